"""What a policy update takes where the samples of a prompt share its computation, against rows computed alone.

    python scripts/bench/prefix_packing.py [--hidden 192] [--layers 2] [--prompts 1] [--samples 8] [--rounds 10]
    torchrun --nproc-per-node 2 scripts/bench/prefix_packing.py     # on two ranks, each with prompts of its own

GRPO's update with fsdp2 on CPU, in float32.  The two take turns in one run, after one update each that is not counted; seconds
are medians of wall time.  tokens: those of the rows for each that is computed.  gradient: the relative distance of the
gradients from the same weights.  Exit status 1 where a bound does not hold.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")

import tiny_model
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from rlhub.config.sections.actor import ActorConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig, OptimConfig
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.engines.training.updates import PolicyUpdater

CPU = torch.device("cpu")
SHAPES = {"prompts 3x as long": (288, 96, 1.9), "prompts as long": (128, 128, 1.3)}
"""The tokens of a prompt and of a response, and the bound on the speed-up."""
EXACT = 1e-5


def engine(folder: Path, share_prefixes: bool) -> FSDPEngine:
    model = ModelConfig(path=str(folder), enable_gradient_checkpointing=False)
    limits = MicroBatchConfig(share_prefixes=share_prefixes)
    built = FSDPEngine(model, FSDPConfig(), OptimConfig(lr=1e-6), kind="policy", device=CPU, micro_batch=limits)
    built.initialize()
    return built


def batch(prompts: int, samples: int, prompt: int, response: int) -> dict[str, Tensor]:
    """Returns this rank's rows: `samples` responses of each prompt, with advantages."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    texts = torch.randint(2, tiny_model.VOCAB_SIZE, (prompts, prompt), generator=generator).repeat_interleave(samples, 0)
    answers = torch.randint(2, tiny_model.VOCAB_SIZE, (prompts * samples, response), generator=generator)
    ids, advantages = torch.cat([texts, answers], 1), torch.randn(len(answers), 1, generator=generator)
    mask = torch.ones_like(answers)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "response_mask": mask,
        "advantages": advantages * mask,
        "old_log_probs": torch.full(mask.shape, -6.0),
    }


def gradient(trained: FSDPEngine, rows: Rows) -> Tensor:
    def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        assert outputs.log_probs is not None
        return LossOutput(loss=-(outputs.log_probs * micro["advantages"]).mean())

    trained.forward_backward(rows, loss)
    return torch.cat([grad.flatten() for param in trained.params if (grad := param.local_grad) is not None])


def compare(folder: Path, args: argparse.Namespace, prompt: int, response: int) -> tuple[float, float, float, float]:
    """Returns the seconds of an update alone and shared, the ratio of tokens, and the distance of the gradients."""
    rows = batch(args.prompts, args.samples, prompt, response)
    engines = [engine(folder, share) for share in (False, True)]
    alone, shared = (gradient(trained, rows) for trained in engines)
    updaters = [PolicyUpdater(trained, ActorConfig(), scale=float(response)) for trained in engines]
    seconds: list[list[float]] = [[], []]
    metrics: dict[str, float] = {}
    for _ in range(args.rounds + 1):
        for taken, updater in zip(seconds, updaters, strict=True):
            dist.barrier()
            start = time.perf_counter()
            metrics = updater.update(rows, 1)
            taken.append(time.perf_counter() - start)
    slow, fast = (statistics.median(taken[1:]) for taken in seconds)
    return slow, fast, metrics["perf/prefix_token_ratio"], float((alone - shared).norm() / alone.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("hidden", 192), ("layers", 2), ("prompts", 1), ("samples", 8), ("rounds", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ensure_process_group(CPU)
    table = Table("n = " + str(args.samples), "tokens", "alone, s", "shared, s", "speed-up", "bound", "gradient")
    good = True
    for name, (prompt, response, bound) in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            tiny_model.build(Path(folder), hidden=args.hidden, layers=args.layers)
            slow, fast, ratio, distance = compare(Path(folder), args, prompt, response)
        good &= slow / fast >= bound and distance <= EXACT
        figures = (f"{ratio:.2f}", f"{slow:.3f}", f"{fast:.3f}", f"{slow / fast:.2f}x", f"{bound}x", f"{distance:.1e}")
        table.add_row(name, *figures)
    if dist.get_rank() == 0:
        Console().print(table)
    dist.destroy_process_group()
    sys.exit(not good)


if __name__ == "__main__":
    main()
