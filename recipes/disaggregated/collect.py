"""A job that only collects: episodes of the newest weights it finds, into files that another job trains on.

    python recipes/disaggregated/collect.py <the settings of the training job's main_ppo>

Needs actor_rollout_ref.rollout.trajectories_folder (where the files go) and .weights_folder (where the trainer leaves its
weights).  Runs until it is stopped, or for --groups N groups of samples.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from rlhub.config.cli import run as run_cli
from rlhub.config.sections.ppo import PPOConfig
from rlhub.data.order import ResumableLoader
from rlhub.engines.rollout.base import RolloutEngine
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.errors import ConfigError, DeadlineError
from rlhub.models.tokenizer import read_vocabulary
from rlhub.rewards.rows import no_turn_scores
from rlhub.rollout_service.executor.executor import ExecutorOptions, WorkflowExecutor
from rlhub.rollout_service.executor.ledger import PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.rollout_service.trajectory_files import TrajectoryWriter
from rlhub.sharding_manager.reader import WeightReader
from rlhub.trainer.ppo.episodes import Workflows, samplings
from rlhub.trainer.ppo.stream_source import LoaderPositions
from rlhub.trainer.ppo.trainer import build_data
from rlhub.utils.aio.task_runner import AsyncTaskRunner

logger = logging.getLogger("collect")

POLL_S = 0.2
FILE_GROUPS = 8
"""Groups in a file: few enough that a step does not wait for its last ones."""


def main(arguments: Sequence[str]) -> int:
    """Collect; returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=None, help="stop after so many (default: when stopped)")
    parser.add_argument("--name", default="collector", help="of this collector among others (default: %(default)s)")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    job = partial(collect_until_stopped, name=options.name, num_groups=options.groups)
    return run_cli(PPOConfig, "ppo", job, description=__doc__ or "", argv=options.settings)


def collect_until_stopped(config: PPOConfig, *, name: str, num_groups: int | None) -> int:
    """The job: returns its exit status."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.trajectories_folder is None or rollout.weights_folder is None:
        raise ConfigError(["set actor_rollout_ref.rollout.trajectories_folder and actor_rollout_ref.rollout.weights_folder"])
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    writer = TrajectoryWriter(rollout.trajectories_folder, name)
    collect(config, Path(rollout.weights_folder), writer, num_groups, stopped)
    writer.end()
    return 0


def collect(config: PPOConfig, weights: Path, writer: TrajectoryWriter, num_groups: int | None, stopped: threading.Event) -> None:
    """Follow the weights, and write groups as they finish, until there are so many or `stopped` is set."""
    engine, runner = make_engine(config), AsyncTaskRunner(name="episodes")
    executor, positions, batches = make_executor(config, engine, runner)
    reader = WeightReader(engine, weights, bucket_bytes=config.actor_rollout_ref.rollout.update_weights_bucket_mb << 20)
    version = reader.prepare(wait_first(reader, stopped)) if not stopped.is_set() else None
    if version is None or stopped.is_set():
        return
    reader.place(version)
    executor.set_version(version.version)
    executor.start(positions.items(iter(batches)))
    follower = threading.Thread(target=follow, args=(reader, engine, executor, stopped), daemon=True)
    follower.start()
    written = 0
    while not stopped.is_set() and (num_groups is None or written < num_groups):
        wanted = FILE_GROUPS if num_groups is None else min(FILE_GROUPS, num_groups - written)
        try:
            groups = executor.next_groups(wanted, timeout=1.0)
        except DeadlineError:  # nothing may be started before the next version
            continue
        if not groups:
            break
        logger.info("%s: %d groups of version %d", writer.write(groups), len(groups), engine.version)
        written += len(groups)
    stopped.set()
    follower.join()
    executor.close()
    runner.close()
    engine.shutdown()


def wait_first(reader: WeightReader, stopped: threading.Event) -> int:
    """The newest version, once there is one; 0 if it is stopped before."""
    while (newest := reader.newest()) is None and not stopped.wait(POLL_S):
        pass
    return newest or 0


def follow(reader: WeightReader, engine: RolloutEngine, executor: WorkflowExecutor, stopped: threading.Event) -> None:
    """Take each newer version, between two tokens."""
    while not stopped.wait(POLL_S):
        newest = reader.newest()
        if newest is not None and newest > engine.version:
            mapped = reader.prepare(newest)
            engine.pause()
            reader.place(mapped)
            engine.resume()
            executor.set_version(newest)


def make_engine(config: PPOConfig) -> RolloutEngine:
    section = config.actor_rollout_ref
    engine = build_rollout_engine(
        RolloutSetup(
            config=section.rollout,
            model=section.model,
            device=torch.device(config.trainer.device),
            seed=config.trainer.seed,
            max_prompt_length=config.data.max_prompt_length,
            max_response_length=config.data.max_response_length,
        )
    )
    engine.initialize()
    return engine


def make_executor(
    config: PPOConfig, engine: RolloutEngine, runner: AsyncTaskRunner
) -> tuple[WorkflowExecutor, LoaderPositions, ResumableLoader]:
    """Episodes over the prompts of the settings, as far ahead of training as they allow."""
    data, trainer = build_data(config), config.trainer
    vocabulary = read_vocabulary(config.actor_rollout_ref.model, data.tokenizer)
    workflows = Workflows(config, data.tokenizer, samplings(config, vocabulary), no_turn_scores)
    executor = WorkflowExecutor(
        runner=runner,
        engine=engine,
        workflow_for=workflows.of,
        staleness=StalenessManager(
            batch=config.data.train_batch_size, max_staleness=trainer.max_staleness, pipeline_depth=trainer.pipeline_depth
        ),
        ledger=PromptLedger(),
        options=ExecutorOptions(group_size=config.actor_rollout_ref.rollout.n, seed=trainer.seed, stale_policy="correct"),
    )
    return executor, LoaderPositions(data.loader), data.loader


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
