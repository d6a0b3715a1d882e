"""Policy updates of ranks that keep the memory they free (`rlhub/utils/freed_memory.py`) against ranks that give it back.

    python scripts/bench/kept_memory.py [--rounds 8] [--lengths 60] [--ranks 1]

10M parameters, 128 rows of 64 tokens, one thread a rank, through Ray.  Both groups stay alive and take turns, in which the
other's processes are stopped.  Then both make `--lengths` updates of random lengths (up to 64 tokens): what that adds to the
memory that is kept is what does not fit into it again.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import psutil
import tiny_model
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from two_ranks import PROMPT_TOKENS, RESPONSE_TOKENS, ROWS, Seconds, configuration, stopped, timed

from rlhub.engines.training.fsdp import engine
from rlhub.protocol import DataProto
from rlhub.single_controller import ClassWithInitArgs, Dispatch, LaunchOptions, WorkerGroup, launch, register
from rlhub.workers.actor_rollout_ref import ActorRolloutRefWorker
from rlhub.workers.runtime import WorkerRuntime

GIB = 2**30


class GivingBackWorker(ActorRolloutRefWorker):
    """The control: glibc's own settings."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        engine.keep_freed_memory = lambda: False
        super().init_model()


def batch(response_tokens: int) -> DataProto:
    """ROWS rows of PROMPT_TOKENS + response_tokens, all of them trained."""
    shape = (ROWS, PROMPT_TOKENS + response_tokens)
    ids = torch.randint(2, tiny_model.VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(response_tokens))
    mask = torch.ones(ROWS, response_tokens)
    data = DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "response_mask": mask.long(),
            "advantages": mask,
            "rollout_log_probs": -mask,
        }
    )
    data.meta_info.update(num_mini_batches=1, temperature=1.0)
    return data


def update(group: WorkerGroup, response_tokens: int) -> Seconds:
    data = batch(response_tokens)
    return timed(group, lambda: group.update_actor(data))[0]


def system_seconds(group: WorkerGroup) -> float:
    return max(psutil.Process(worker.pid).cpu_times().system for worker in group.workers)


def resident(group: WorkerGroup) -> float:
    """GiB of the largest rank."""
    return max(psutil.Process(worker.pid).memory_info().rss for worker in group.workers) / GIB


def measure(group: WorkerGroup) -> tuple[float, float]:
    """(wall clock, system) seconds of an update."""
    before = system_seconds(group)
    wall, _ = update(group, RESPONSE_TOKENS)
    return wall, system_seconds(group) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 8), ("lengths", 60), ("ranks", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rlhub-bench-"))
    parameters = tiny_model.build(folder, hidden=384, layers=6)
    config = configuration(folder, "hf")
    runtime = WorkerRuntime(device="cpu", seed=1, max_prompt_length=PROMPT_TOKENS, max_response_length=RESPONSE_TOKENS)
    roles = {
        name: ClassWithInitArgs(worker, config.actor_rollout_ref, runtime)
        for name, worker in (("kept", ActorRolloutRefWorker), ("given back", GivingBackWorker))
    }
    draw = random.Random(0)
    with (
        launch({"kept": roles["kept"]}, LaunchOptions(ranks_per_node=arguments.ranks, ray_init={"num_cpus": 4})) as one,
        launch({"given back": roles["given back"]}, LaunchOptions(ranks_per_node=arguments.ranks)) as other,
    ):
        groups = {"kept": one.groups["kept"], "given back": other.groups["given back"]}
        for group in groups.values():
            group.init_model()
            update(group, RESPONSE_TOKENS)
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in groups}
        for _ in range(arguments.rounds):
            for name, group in groups.items():
                with stopped(groups["given back" if name == "kept" else "kept"]):
                    seconds[name].append(measure(group))
        before = {name: resident(group) for name, group in groups.items()}
        for _ in track(range(arguments.lengths), description="random lengths"):
            tokens = draw.randint(1, RESPONSE_TOKENS)
            for group in groups.values():
                update(group, tokens)
        after = {name: resident(group) for name, group in groups.items()}
    table = Table(title=f"an update of {parameters / 1e6:.1f}M parameters, {ROWS} x {PROMPT_TOKENS + RESPONSE_TOKENS} tokens")
    for column in (
        "memory",
        "seconds",
        "of them in the kernel",
        "GiB after it",
        f"GiB after {arguments.lengths} of other lengths",
    ):
        table.add_column(column)
    for name, rounds in seconds.items():
        wall, system = (statistics.median(figures) for figures in zip(*rounds, strict=True))
        table.add_row(name, f"{wall:.3f}", f"{system:.3f}", f"{before[name]:.2f}", f"{after[name]:.2f}")
    Console().print(table)
    kept, given_back = (statistics.median(wall for wall, _ in seconds[name]) for name in ("kept", "given back"))
    print(f"kept memory: {kept / given_back:.2f}x of the time")


if __name__ == "__main__":
    main()
