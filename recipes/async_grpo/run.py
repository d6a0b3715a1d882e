"""The quickstart's task, trained asynchronously: one setting, trainer.max_staleness, from taking turns to running far ahead.

    python recipes/async_grpo/run.py [--staleness 0 1 4] [--seed 1] [--out FOLDER] [key=value ...]

Data, model and warm start are those of recipes/arithmetic (made if they are not there).  Then one training for each bound; a
training that is done is not repeated.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger("async_grpo")

ARITHMETIC = Path(__file__).resolve().parents[1] / "arithmetic" / "run.py"
SETTINGS = (
    "actor_rollout_ref.rollout.mode=async",
    "algorithm.rollout_correction.rollout_is=token",  # old samples are weighted by pi_old / mu
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with each bound; returns the first failing status, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    options, overrides = parser.parse_known_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out = (options.out or Path("outputs/arithmetic") / f"seed{options.seed}").absolute()
    for staleness in options.staleness:
        command = [sys.executable, str(ARITHMETIC), "--seed", str(options.seed), "--steps", str(options.steps), "--out", str(out)]
        command += ["--name", name_of(staleness), *SETTINGS, f"trainer.max_staleness={staleness}", *overrides]
        if status := subprocess.run(command, check=False).returncode:
            return status
    for staleness in options.staleness:
        logger.info("%s", summary(staleness, out / name_of(staleness) / "metrics.jsonl"))
    return 0


def name_of(staleness: int) -> str:
    """Of the run's folder."""
    return f"async-{staleness}"


def summary(staleness: int, metrics: Path) -> str:
    """A run in a line."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    checked = [row for row in rows if "val/pass@1" in row]
    seconds = sum(row["timing_s/step"] for row in steps) / len(steps)
    age = sum(row.get("staleness/mean", 0.0) for row in steps) / len(steps)
    return (
        f"max_staleness={staleness}: accuracy {checked[0]['val/pass@1']:.3f} -> {checked[-1]['val/pass@1']:.3f}, "
        f"{seconds:.2f} s a step, mean staleness {age:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
