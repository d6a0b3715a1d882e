"""Where simulators live changes nothing that is learned, the loss of their actors costs episodes only, and episodes that run
ahead of training train once each, also when the run was ended in between."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from recipes.tiny_smolvlm import write_model
from rlhub.config.cli import prepare
from rlhub.config.schema import to_dict
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import WorkerDiedError
from rlhub.trainer.ppo.embodied import SUCCESSES
from rlhub.trainer.ppo.episode_stream import EpisodeStream
from rlhub.trainer.ppo.trainer import PPOTrainer, build_data, build_trainer
from rlhub.trainer.preflight.checks import check
from rlhub.trainer.run import Run
from tests.support.metrics import rows_of
from tests.support.processes import all_end
from tests.support.vla import BINS, TOKENS, settings

SCENES, AHEAD_STEPS = 8, 5
VARYING = ("timing_", "perf/", "memory/")
HELD = """
import os, time
from pathlib import Path
from rlhub.envs.vector.reach_color import ReachColor

class Held(ReachColor):
    # A step of a process that the file beside this one names does not end.
    held = Path(__file__).with_name("held")

    def step(self, action):
        while self.held.exists() and str(os.getpid()) in self.held.read_text().split():
            Path(f"{__file__}.{os.getpid()}.held").touch()
            time.sleep(0.01)
        return super().step(action)
"""
SIMULATORS_APART = ("trainer.pools.sim.n_gpus_per_node=4", "trainer.placement.environments=sim")
EASY = """
from rlhub.envs.vector import reach_color

reach_color.RADIUS = 0.8


class Easy(reach_color.ReachColor):
    pass
"""
SELF_REFERENTIAL = ("env.reward=srpo", "env.srpo.task=instruction", "env.num_scenes=64")
ROLLOUT_APART = ("trainer.pools.gen.n_gpus_per_node=2", "trainer.placement.rollout=gen")


@dataclass(slots=True, kw_only=True)
class Job:
    folder: Path

    def config(self, name: str, *more: str) -> PPOConfig:
        vla = json.dumps(settings()).replace('"', "")
        overrides = [
            "env.name=reach_color",
            "env.num_envs=4",
            f"actor_rollout_ref.model.path={self.folder / 'model'}",
            f"actor_rollout_ref.model.vla={vla}",
            "actor_rollout_ref.rollout.name=hf",
            f"data.train_batch_size={SCENES}",
            "data.max_prompt_length=16",
            "data.max_response_length=8",
            "algorithm.adv_estimator=chunk_gae",
            "actor_rollout_ref.actor.log_prob_level=chunk",
            "actor_rollout_ref.actor.value_loss_coef=0.5",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={SCENES // 2}",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "trainer.device=cpu",
            "trainer.total_training_steps=3",
            "trainer.save_freq=-1",
            "trainer.logger=[]",
            f"trainer.default_local_dir={self.folder / name}",
            *more,
        ]
        return prepare(PPOConfig, "ppo", overrides, preflight=check)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if not key.startswith(VARYING)} for row in rows_of(self.folder / name)]

    def weights(self, name: str, step: int = 3) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / f"global_step_{step}" / "actor/huggingface/model.safetensors")


@pytest.fixture(scope="module")
def job(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("simulators")
    write_model(folder / "model", 1, ("touch", "red", "blue"), num_places=TOKENS, num_bins=BINS)
    (folder / "held.py").write_text(HELD)
    (folder / "easy.py").write_text(EASY)
    return Job(folder=folder)


class Started:
    """A trainer with its workers, ended by `close`, after which none of their processes is left."""

    def __init__(self, config: PPOConfig) -> None:
        self.stack = ExitStack()
        data = build_data(config)
        self.run = self.stack.enter_context(Run(config.trainer, to_dict(config), data.total_steps))
        self.trainer: PPOTrainer = build_trainer(config, data, self.run, self.stack)
        self.run.start()
        self.prompts = self.trainer.loader.endless()

    def step(self, number: int) -> None:
        """Takes one step, and saves where it is due."""
        self.run.begin_step(number)
        metrics = self.trainer.train_step(number, self.prompts)
        self.trainer.source.trained(number)
        self.run.end_step(number, metrics, save=self.trainer.save, state=self.trainer.state, last=False, late=None)

    def actors(self) -> list[psutil.Process]:
        """Returns the processes of this run's simulators, which write to logs of theirs: the machine may run others."""
        return [one for one in psutil.process_iter() if output_of(one).startswith(f"{self.run.folder.logs}/simulators-")]

    def close(self) -> None:
        groups = self.trainer.groups
        ranks = {worker.pid for group in (groups.actor, groups.rollout) for worker in group.workers}
        actors = self.actors()
        children = {child.pid for one in [*actors, *map(psutil.Process, ranks)] for child in one.children(recursive=True)}
        self.stack.close()
        assert all_end(ranks | {one.pid for one in actors} | children)


def output_of(process: psutil.Process) -> str:
    """Returns the file that an actor of Ray writes to; "" for others, and for its children."""
    try:
        is_actor = process.cmdline()[:1] != [] and process.cmdline()[0].startswith("ray::")
        return os.readlink(f"/proc/{process.pid}/fd/1") if is_actor else ""
    except (psutil.Error, OSError):
        return ""


@pytest.fixture
def start() -> Iterator[Callable[[PPOConfig], Started]]:
    with ExitStack() as stack:

        def begin(config: PPOConfig) -> Started:
            started = Started(config)
            stack.callback(started.stack.close)
            return started

        yield begin


def test_simulators_in_the_ranks_apart_and_all_apart_learn_the_same(job: Job, start: Callable[[PPOConfig], Started]) -> None:
    """Bit for bit: metrics and weights after three steps on two ranks, in two stages."""
    placements = {
        "together": (0, ()),
        "environments_apart": (4, SIMULATORS_APART),
        "all_apart": (4, (*SIMULATORS_APART, *ROLLOUT_APART)),
    }
    for name, (num_actors, more) in placements.items():
        started = start(job.config(name, "trainer.n_gpus_per_node=2", "env.stages=2", *more))
        assert len(started.actors()) == num_actors
        assert started.trainer.fit() == 3
        started.close()
    expected, weights = job.rows("together"), job.weights("together")
    assert [row["step"] for row in expected] == [1, 2, 3] and expected[-1]["rollout/lost_episodes"] == 0
    for name in ("environments_apart", "all_apart"):
        assert job.rows(name) == expected
        assert all(torch.equal(tensor, weights[key]) for key, tensor in job.weights(name).items())


def test_a_killed_actor_costs_its_episodes_and_the_run_goes_on(job: Job, start: Callable[[PPOConfig], Started]) -> None:
    reserved = ("trainer.pools.sim={n_gpus_per_node: 2, process_cpus: 1}", "trainer.ray_init.num_cpus=5")
    own = (f"env.name={job.folder / 'held.py'}:Held", *reserved)
    started = start(job.config("killed", *own, "trainer.placement.environments=sim"))
    victim = started.actors()[0]
    orphans = {child.pid for child in victim.children(recursive=True)}
    assert orphans, "the simulators are its children"

    def kill() -> None:
        deadline = time.monotonic() + 240
        while not list(job.folder.glob("held.py.*.held")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(victim.pid, signal.SIGKILL)

    started.step(1)
    (job.folder / "held.part").write_text(" ".join(map(str, orphans)))
    (job.folder / "held.part").rename(job.folder / "held")
    killing = threading.Thread(target=kill)
    killing.start()
    started.step(2)
    killing.join()
    assert list(job.folder.glob("held.py.*.held")), "it was killed in the midst of a step"
    started.step(3)
    lost = [row["rollout/lost_episodes"] for row in job.rows("killed")]
    assert lost[0] == 0 < lost[1] <= SCENES / 2 and lost[2] == 0, lost
    assert all_end(orphans | {victim.pid}) and len(started.actors()) == 2
    started.close()


def ahead(bound: int) -> tuple[str, ...]:
    return (
        *("actor_rollout_ref.rollout.mode=async", f"trainer.max_staleness={bound}", "trainer.save_freq=2"),
        *("trainer.pools.gen={}", "trainer.placement.rollout=gen", "algorithm.rollout_correction.rollout_is=token"),
        f"trainer.total_training_steps={AHEAD_STEPS}",
    )


def test_episodes_ahead_of_training_train_once_each(job: Job, start: Callable[[PPOConfig], Started]) -> None:
    """The run ends after step 3 with a batch in work, and its newest checkpoint is of step 2.  Failures are compared with
    successes."""
    own = (*ahead(1), *SIMULATORS_APART, *SELF_REFERENTIAL, f"env.name={job.folder / 'easy.py'}:Easy")
    started = start(job.config("ahead", *own))
    for step in (1, 2, 3):
        started.step(step)
    started.close()
    resumed = start(job.config("ahead", *own))
    assert resumed.trainer.fit() == AHEAD_STEPS
    resumed.close()
    rows = job.rows("ahead")
    assert [(row["step"], row["rollout/staleness"]) for row in rows] == [(1, 0), (2, 1), (3, 0), (4, 1), (5, 1)]
    assert "mismatch/kl/staleness_1" in rows[-1] and "mismatch/weight_max" in rows[-1]
    kept = [len(load_file(job.folder / "ahead" / f"global_step_{step}" / SUCCESSES)["task"]) for step in (2, 4)]
    assert 0 < kept[0] < kept[1], "a checkpoint has the successes that the resumed run compares with"
    assert_once_each(job, "ahead")


def test_several_batches_ahead_train_once_each_over_a_kill(job: Job, start: Callable[[PPOConfig], Started]) -> None:
    """The rank that simulates is killed with two batches ahead, which its death loses only where they were not over."""
    started = start(job.config("further", *ahead(2)))
    started.step(1)
    stream = started.trainer.source
    assert isinstance(stream, EpisodeStream)
    with stream._changed:
        assert stream._changed.wait_for(lambda: len(stream._ahead) == 2 and not stream._is_busy, timeout=240)
    started.step(2)
    victim = started.trainer.groups.rollout.workers[0]
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=f"process {victim.pid} "):
        for step in (3, 4, 5):
            started.step(step)
    started.stack.close()
    resumed = start(job.config("further", *ahead(2)))
    assert resumed.trainer.fit() == AHEAD_STEPS
    resumed.close()
    found = [row["rollout/staleness"] for row in job.rows("further")]
    assert found[1] == 1 and max(found) <= 2
    assert_once_each(job, "further")


def assert_once_each(job: Job, name: str) -> None:
    log = [json.loads(line) for line in (job.folder / name / "prompts.jsonl").read_text().splitlines()]
    assert [(row["ordinal"], row["step"]) for row in log] == [(i, 1 + i // SCENES) for i in range(AHEAD_STEPS * SCENES)]


@pytest.mark.parametrize("reward", ["simulator", "srpo"])
def test_without_staleness_async_is_sync(job: Job, start: Callable[[PPOConfig], Started], reward: str) -> None:
    for mode in ("sync", "async"):
        own: tuple[str, ...] = ("actor_rollout_ref.rollout.n=2", f"env.name={job.folder / 'easy.py'}:Easy")
        own += SELF_REFERENTIAL if reward == "srpo" else ()
        started = start(job.config(f"{mode}-{reward}", f"actor_rollout_ref.rollout.mode={mode}", *own))
        started.trainer.fit()
        started.close()
    rows, weights = (getattr(job, kind)(f"sync-{reward}") for kind in ("rows", "weights"))
    assert all(torch.equal(tensor, weights[key]) for key, tensor in job.weights(f"async-{reward}").items())
    if reward == "srpo":
        assert any(row["rollout/return"] > row["rollout/success"] > 0 for row in rows), "failures have rewards"
