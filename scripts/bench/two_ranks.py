"""Two ranks on two cores against one: the policy update and generation, timed apart.

    python scripts/bench/two_ranks.py [--rounds 5] [--engines hf vllm] [--own-weights]

10M parameters, 128 rows of 64 tokens (16 prompt + 48 response), one thread a rank, through Ray.  Both groups stay alive
and take turns, in which the other's processes are stopped (ranks that wait still wake hundreds of times a second).  The
figures are medians of wall-clock seconds, so run it on an idle machine.  Two ranks need both cores undisturbed, which a
machine shared with others gives only at times: beside the medians stand the least disturbed turns of either.  The CPU
seconds are of the rank that needs most; others take cache and memory bandwidth from them too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import psutil
import tiny_model
import torch
from rich.console import Console
from rich.table import Table

from rlhub.config.rules.derive import derive
from rlhub.config.sections.ppo import PPOConfig
from rlhub.protocol import DataProto
from rlhub.single_controller import ClassWithInitArgs, LaunchOptions, WorkerGroup, launch
from rlhub.workers.actor_rollout_ref import ActorRolloutRefWorker
from rlhub.workers.runtime import WorkerRuntime

ROWS, PROMPT_TOKENS, RESPONSE_TOKENS, SAMPLES = 128, 16, 48, 4
WANTED = 1.6


def configuration(folder: Path, engine: str, *, share: bool = True) -> PPOConfig:
    """GRPO on the bench's model, generating a fixed number of tokens."""
    config = PPOConfig()
    config.actor_rollout_ref.model.path = str(folder)
    config.actor_rollout_ref.model.enable_gradient_checkpointing = False
    config.actor_rollout_ref.rollout.name = engine
    config.actor_rollout_ref.rollout.ignore_eos = True
    config.actor_rollout_ref.rollout.share_weights = share
    config.data.max_prompt_length, config.data.max_response_length = PROMPT_TOKENS, RESPONSE_TOKENS
    config.trainer.device = "cpu"
    derive(config)
    return config


def prompts() -> DataProto:
    """ROWS / SAMPLES prompts of full length."""
    ids = torch.randint(2, tiny_model.VOCAB_SIZE, (ROWS // SAMPLES, PROMPT_TOKENS), generator=torch.Generator().manual_seed(1))
    data = DataProto.from_dict(
        tensors={"prompts": ids, "attention_mask": torch.ones_like(ids), "ordinal": torch.arange(len(ids))}
    )
    data.meta_info.update(n=SAMPLES, temperature=1.0, top_p=1.0, top_k=-1, log_probs=True)
    return data


GENERATIONS = 6  # a round: they are short beside an update, and a few of them say little on a machine shared with others

Seconds = tuple[float, float]  # wall clock; CPU time of the rank that needs most


def cpu_seconds(group: WorkerGroup) -> list[float]:
    """Of each rank's process and its children so far."""
    ranks = [psutil.Process(worker.pid) for worker in group.workers]
    times = [[process.cpu_times() for process in (rank, *rank.children(recursive=True))] for rank in ranks]
    return [sum(spent.user + spent.system for spent in rank) for rank in times]


@contextmanager
def stopped(group: WorkerGroup) -> Iterator[None]:
    """Its ranks and their children do not run meanwhile."""
    ranks = [psutil.Process(worker.pid) for worker in group.workers]
    processes = [process for rank in ranks for process in (rank, *rank.children(recursive=True))]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def timed(group: WorkerGroup, call: Callable[[], DataProto]) -> tuple[Seconds, DataProto]:
    before, start = cpu_seconds(group), time.perf_counter()
    out = call()
    wall = time.perf_counter() - start
    return (wall, max(late - early for early, late in zip(before, cpu_seconds(group), strict=True))), out


def generate(group: WorkerGroup) -> tuple[Seconds, DataProto]:
    return timed(group, lambda: group.generate_sequences(prompts()))


def update(group: WorkerGroup) -> Seconds:
    _, batch = generate(group)
    batch.batch["advantages"] = batch.batch["response_mask"].float()
    data = batch.select(batch_keys=["input_ids", "attention_mask", "response_mask", "advantages", "rollout_log_probs"])
    data.meta_info["num_mini_batches"] = 1
    return timed(group, lambda: group.update_actor(data))[0]


Figures = dict[str, dict[int, list[Seconds]]]  # by phase and number of ranks


def show(title: str, figures: Figures) -> None:
    table = Table(title=title)
    shown = ("", "1 rank, s", "2 ranks, s", "speed-up", "wanted", "least disturbed", "speed-up", "CPU s of 1", "of 2", "speed-up")
    for column in shown:
        table.add_column(column)
    for phase, rounds in figures.items():
        (wall, wall_of_two), (cpu, cpu_of_two) = (
            [statistics.median(seconds[index] for seconds in rounds[ranks]) for ranks in (1, 2)] for index in (0, 1)
        )
        best, best_of_two = (min(seconds[0] for seconds in rounds[ranks]) for ranks in (1, 2))
        table.add_row(
            *(phase, f"{wall:.3f}", f"{wall_of_two:.3f}", f"{wall / wall_of_two:.2f}"),
            f"{WANTED}",
            *(f"{best:.3f}, {best_of_two:.3f}", f"{best / best_of_two:.2f}"),
            *(f"{cpu:.3f}", f"{cpu_of_two:.3f}", f"{cpu / cpu_of_two:.2f}"),
        )
    Console(width=max(Console().width, 124)).print(table)


def compare(folder: Path, engine: str, rounds: int, *, share: bool) -> Figures:
    config = configuration(folder, engine, share=share)
    runtime = WorkerRuntime(device="cpu", seed=1, max_prompt_length=PROMPT_TOKENS, max_response_length=RESPONSE_TOKENS)
    role = ClassWithInitArgs(ActorRolloutRefWorker, config.actor_rollout_ref, runtime)
    figures: Figures = {phase: {1: [], 2: []} for phase in ("generation", "update")}
    with (
        launch({"one": role}, LaunchOptions(ranks_per_node=1, ray_init={"num_cpus": 4})) as one,
        launch({"two": role}, LaunchOptions(ranks_per_node=2)) as two,
    ):
        groups = {1: one.groups["one"], 2: two.groups["two"]}
        for group in groups.values():
            group.init_model()
            group.sync_weights(0)
            group.sync_weights(1)  # from here on as a plan moves them
            update(group)
        for turn in range(rounds * GENERATIONS):
            for ranks, group in groups.items():
                with stopped(groups[3 - ranks]):
                    figures["generation"][ranks].append(generate(group)[0])
                    if turn % GENERATIONS == 0:
                        figures["update"][ranks].append(update(group))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    installed = ["hf", *(["vllm"] if find_spec("vllm") else [])]
    parser.add_argument(
        "--engines", nargs="+", default=installed, help="rollout engines, one after the other; all that are there"
    )
    parser.add_argument("--own-weights", action="store_true", help="each rank's engine keeps a copy of its own of the weights")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rlhub-bench-"))
    parameters = tiny_model.build(folder, hidden=384, layers=6)
    tokens = PROMPT_TOKENS + RESPONSE_TOKENS
    for engine in arguments.engines:
        figures = compare(folder, engine, arguments.rounds, share=not arguments.own_weights)
        show(f"two ranks against one, {parameters / 1e6:.1f}M parameters, {ROWS} x {tokens} tokens, {engine}", figures)


if __name__ == "__main__":
    main()
