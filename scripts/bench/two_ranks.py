"""Two ranks on two cores against one: the policy update and generation, timed apart.

    python scripts/bench/two_ranks.py [--rounds 5]

10M parameters, 128 rows of 64 tokens (16 prompt + 48 response), one thread a rank, through Ray.  Both groups stay alive
and take turns; the figures are medians of wall-clock seconds, so run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import tiny_model
import torch
from rich.console import Console
from rich.table import Table

from rlhub.config.derive import derive
from rlhub.config.ppo import PPOConfig
from rlhub.protocol import DataProto
from rlhub.single_controller import ClassWithInitArgs, WorkerGroup, launch
from rlhub.workers.actor_rollout_ref import ActorRolloutRefWorker
from rlhub.workers.runtime import WorkerRuntime

ROWS, PROMPT_TOKENS, RESPONSE_TOKENS, SAMPLES = 128, 16, 48, 4
WANTED = 1.6


def configuration(folder: Path, engine: str) -> PPOConfig:
    """GRPO on the bench's model, generating a fixed number of tokens."""
    config = PPOConfig()
    config.actor_rollout_ref.model.path = str(folder)
    config.actor_rollout_ref.model.enable_gradient_checkpointing = False
    config.actor_rollout_ref.rollout.name = engine
    config.actor_rollout_ref.rollout.ignore_eos = True
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


def measure(group: WorkerGroup) -> tuple[float, float]:
    """(generation, update) in seconds of wall clock."""
    start = time.perf_counter()
    batch = group.generate_sequences(prompts())
    generated = time.perf_counter()
    batch.batch["advantages"] = batch.batch["response_mask"].float()
    update = batch.select(batch_keys=["input_ids", "attention_mask", "response_mask", "advantages", "rollout_log_probs"])
    update.meta_info["num_mini_batches"] = 1
    before = time.perf_counter()
    group.update_actor(update)
    return generated - start, time.perf_counter() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", default="auto", help="rollout engine; auto is vllm where it is installed")
    arguments = parser.parse_args()
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="rlhub-bench-"))
    parameters = tiny_model.build(folder, hidden=384, layers=6)
    config = configuration(folder, arguments.engine)
    runtime = WorkerRuntime(device="cpu", seed=1, max_prompt_length=PROMPT_TOKENS, max_response_length=RESPONSE_TOKENS)
    role = ClassWithInitArgs(ActorRolloutRefWorker, config.actor_rollout_ref, runtime)
    seconds: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    options = {"backend": "ray", "device": "cpu", "ray_init": {"num_cpus": 4}}
    with launch({"one": role}, ranks_per_node=1, **options) as one, launch({"two": role}, ranks_per_node=2, **options) as two:
        groups = {1: one.groups["one"], 2: two.groups["two"]}
        for group in groups.values():
            group.init_model()
            group.sync_weights(0)
            measure(group)
        for _ in range(arguments.rounds):
            for ranks, group in groups.items():
                seconds[ranks].append(measure(group))
    table = Table(
        title=f"two ranks against one, {parameters / 1e6:.1f}M parameters, {ROWS} x {PROMPT_TOKENS + RESPONSE_TOKENS} tokens"
    )
    for column in ("", "1 rank, s", "2 ranks, s", "speed-up", "wanted"):
        table.add_column(column)
    for index, name in enumerate(("generation", "update")):
        single, double = (statistics.median(pair[index] for pair in seconds[ranks]) for ranks in (1, 2))
        table.add_row(name, f"{single:.3f}", f"{double:.3f}", f"{single / double:.2f}", f"{WANTED}")
    console.print(table)


if __name__ == "__main__":
    main()
