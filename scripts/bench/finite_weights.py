"""What it costs to test that the weights are finite, as a share of a policy update and of a weight sync.

    python scripts/bench/finite_weights.py [--hidden 768] [--layers 7] [--rows 16] [--rounds 5] [--strategy fsdp2]

One rank on a CPU, 50M parameters in float32, 16 rows of 64 tokens: far smaller an update than any real one, whose cost grows
with its tokens where the test's does not.  Update, test and sync take turns; the figures are medians of CPU seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import tiny_model
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rlhub.config.rules.derive import derive
from rlhub.config.sections.ppo import PPOConfig
from rlhub.engines.training.collectives import check_finite
from rlhub.protocol import DataProto
from rlhub.single_controller import ClassWithInitArgs, Dispatch, LaunchOptions, launch, register
from rlhub.workers.memory_handover import WorkerRuntime
from rlhub.workers.roles import ActorRolloutRefWorker

PROMPT_TOKENS, RESPONSE_TOKENS = 16, 48


class TimedWorker(ActorRolloutRefWorker):
    """The product's worker, which also says what its parts cost."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def measure(self, rows: int) -> dict[str, float]:
        """Returns the CPU seconds of one of each, of this process."""
        return {
            "update": cpu_seconds(lambda: self.update_actor(batch(rows))),
            "test of the weights": cpu_seconds(lambda: check_finite(self.engine, "here")),
            "sync": cpu_seconds(lambda: self.sync_weights(1)),
            "test before a save": cpu_seconds(lambda: check_finite(self.engine, "here", optimizer=True)),
        }


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def configuration(folder: Path, strategy: str) -> PPOConfig:
    """Returns GRPO on the bench's model, with a learning rate that changes little in any number of rounds."""
    config = PPOConfig()
    config.actor_rollout_ref.model.path = str(folder)
    config.actor_rollout_ref.model.enable_gradient_checkpointing = False
    config.actor_rollout_ref.actor.strategy = strategy  # type: ignore[assignment]
    config.actor_rollout_ref.actor.optim.lr = 1e-6
    config.actor_rollout_ref.rollout.name = "hf"
    config.data.max_prompt_length, config.data.max_response_length = PROMPT_TOKENS, RESPONSE_TOKENS
    config.trainer.device = "cpu"
    derive(config)
    return config


def batch(rows: int) -> DataProto:
    """Returns rows of full length, all of them trained."""
    ids = torch.randint(2, tiny_model.VOCAB_SIZE, (rows, PROMPT_TOKENS + RESPONSE_TOKENS), generator=torch.manual_seed(1))
    mask = torch.ones(rows, RESPONSE_TOKENS)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask.long(), "advantages": mask}
    data = DataProto.from_dict(tensors=tensors | {"rollout_log_probs": -mask})
    data.meta_info.update(num_mini_batches=1, temperature=1.0)
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 768), ("layers", 7), ("rows", 16), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--strategy", choices=("fsdp2", "megatron"), default="fsdp2")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlhub-bench-") as folder:
        parameters = tiny_model.build(Path(folder), hidden=asked.hidden, layers=asked.layers, vocab_size=8192)
        config = configuration(Path(folder), asked.strategy)
        runtime = WorkerRuntime(device="cpu", seed=1, max_prompt_length=PROMPT_TOKENS, max_response_length=RESPONSE_TOKENS)
        role = ClassWithInitArgs(TimedWorker, config.actor_rollout_ref, runtime)
        with launch({"actor": role}, LaunchOptions(backend="local")) as launched:
            group = launched.groups["actor"]
            group.init_model()
            group.sync_weights(0)
            group.measure(asked.rows)
            rounds = [group.measure(asked.rows)[0] for _ in track(range(asked.rounds), "rounds")]
    seconds = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    tokens = asked.rows * (PROMPT_TOKENS + RESPONSE_TOKENS)
    table = Table(
        "part", "CPU ms", "of an update", title=f"{parameters / 1e6:.1f}M parameters, {tokens} tokens, {asked.strategy}"
    )
    for name, value in seconds.items():
        table.add_row(name, f"{1e3 * value:.1f}", f"{100 * value / seconds['update']:.2f} %")
    Console().print(table)


if __name__ == "__main__":
    main()
