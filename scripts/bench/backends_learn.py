"""Do all training backends learn the same?  The quickstart's job on each, over several seeds.

    python scripts/bench/backends_learn.py [--seeds 1 2 3] [--only fsdp2 megatron-tp2 ...] [--steps 60] [--out FOLDER]

Every run is the recipe's own command with a backend's overrides, from one warm start for each seed.  A run that is done is not
repeated.  Compared is the accuracy on 1,024 held-out problems at the end.

Wanted: each backend's mean over the seeds within two standard errors of the first backend's.  The standard error of the
difference is that of the seeds, or that of counting 1,024 right and wrong answers a seed where this is larger (three seeds
that happen to agree do not make the count exact).  The exit status is 1 if a backend misses it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "arithmetic" / "run.py"
NUM_PROBLEMS = 1024
WANTED_STANDARD_ERRORS = 2.0
ACTOR = "actor_rollout_ref.actor"
ROLLOUT_TP = "actor_rollout_ref.rollout.tensor_model_parallel_size"


def _megatron(*, tp: int = 1, pp: int = 1) -> list[str]:
    return [
        f"{ACTOR}.strategy=megatron",
        f"{ACTOR}.megatron.tensor_model_parallel_size={tp}",
        f"{ACTOR}.megatron.pipeline_model_parallel_size={pp}",
    ]


PPO = ["algorithm.adv_estimator=gae", "critic.optim.lr=1e-3"]
BACKENDS: dict[str, tuple[int, list[str]]] = {
    "fsdp2": (2, []),
    "megatron-tp2": (2, _megatron(tp=2)),
    "megatron-pp2": (2, _megatron(pp=2)),
    "megatron-dp2": (2, _megatron()),
    "megatron-tp2-vllm-tp2": (2, [*_megatron(tp=2), f"{ROLLOUT_TP}=2"]),
    "megatron-tp2-pp2": (4, _megatron(tp=2, pp=2)),
    "fsdp2-ppo": (2, PPO),
    "megatron-tp2-ppo": (2, [*PPO, *_megatron(tp=2)]),
    "megatron-pp2-ppo": (2, [*PPO, *_megatron(pp=2)]),
    "megatron-dp2-ppo": (2, [*PPO, *_megatron()]),
    "megatron-tp2-vllm-tp2-ppo": (2, [*PPO, *_megatron(tp=2), f"{ROLLOUT_TP}=2"]),
    "megatron-tp2-pp2-ppo": (4, [*PPO, *_megatron(tp=2, pp=2)]),
}
"""Name -> (ranks, overrides).  Those ending in -ppo are compared among themselves."""


@dataclass(slots=True, kw_only=True)
class Result:
    """Accuracy at the start and the end of one run, and its seconds (0: done before)."""

    start: float
    end: float
    seconds: float


def run(backend: str, seed: int, steps: int, out: Path) -> Result:
    """Run the recipe unless its result is there."""
    ranks, overrides = BACKENDS[backend]
    folder, started = out / f"seed{seed}", time.monotonic()
    metrics = folder / backend / "metrics.jsonl"
    if _last_step(metrics) < steps:
        log = out / f"{backend}-seed{seed}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(RECIPE), "--seed", str(seed), "--out", str(folder), "--name", backend]
        command += ["--steps", str(steps), "--ranks", str(ranks), *overrides]
        with log.open("w") as stream:
            done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise SystemExit(f"{backend}, seed {seed}: ended with status {done.returncode}; see {log}")
    accuracies = [row["val/pass@1"] for row in _rows(metrics) if "val/pass@1" in row]
    return Result(start=accuracies[0], end=accuracies[-1], seconds=time.monotonic() - started)


def _rows(metrics: Path) -> list[dict[str, float]]:
    if not metrics.is_file():
        return []
    return [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]


def _last_step(metrics: Path) -> float:
    return max((row["step"] for row in _rows(metrics) if "val/pass@1" in row), default=-1)


def standard_error(results: list[Result]) -> float:
    """Of the mean of the final accuracies; see the module docstring."""
    ends = [result.end for result in results]
    seeds = statistics.stdev(ends) / math.sqrt(len(ends)) if len(ends) > 1 else 0.0
    mean = statistics.fmean(ends)
    counting = math.sqrt(mean * (1 - mean) / (NUM_PROBLEMS * len(ends)))
    return max(seeds, counting)


def distance(results: list[Result], reference: list[Result]) -> float:
    """Difference of the means in standard errors of the difference."""
    difference = statistics.fmean(r.end for r in results) - statistics.fmean(r.end for r in reference)
    return difference / math.hypot(standard_error(results), standard_error(reference))


def reference_of(backend: str, done: dict[str, list[Result]]) -> list[Result] | None:
    """The first backend of the same algorithm."""
    ppo = backend.endswith("-ppo")
    return next((results for name, results in done.items() if name.endswith("-ppo") == ppo), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", nargs="+", choices=list(BACKENDS), default=list(BACKENDS), metavar="BACKEND")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench_backends")
    options = parser.parse_args()
    console = Console()
    done: dict[str, list[Result]] = {}
    for backend in options.only:
        done[backend] = []
        for seed in options.seeds:
            done[backend].append(run(backend, seed, options.steps, options.out.absolute()))
            last = done[backend][-1]
            console.print(f"{backend}, seed {seed}: {last.start:.3f} -> {last.end:.3f} ({last.seconds:.0f} s)")
    table = Table("backend", "start", "end", "standard error", "distance (standard errors)")
    missed = []
    for backend, results in done.items():
        reference = reference_of(backend, done)
        away = distance(results, reference) if reference is not None and reference is not results else 0.0
        if abs(away) > WANTED_STANDARD_ERRORS:
            missed.append(backend)
        start, end = (statistics.fmean(values) for values in ([r.start for r in results], [r.end for r in results]))
        table.add_row(backend, f"{start:.3f}", f"{end:.3f}", f"{standard_error(results):.4f}", f"{away:+.2f}")
    console.print(table)
    if missed:
        console.print(f"not within {WANTED_STANDARD_ERRORS:g} standard errors: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
