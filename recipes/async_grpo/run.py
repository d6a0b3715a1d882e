"""The quickstart's task, trained asynchronously: one setting, trainer.max_staleness, from taking turns to running far ahead.

    python recipes/async_grpo/run.py [--staleness 0 1 4] [--seed 1] [--out FOLDER] [key=value ...]

Data, model and warm start are those of recipes/arithmetic (made if they are not there).  Then one training for each bound; a
training that is done is not repeated.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes import stages

logger = logging.getLogger("async_grpo")

SETTINGS = (
    "actor_rollout_ref.rollout.mode=async",
    "trainer.pacing=fixed",  # as old as the bound allows, to see what age costs
    "algorithm.rollout_correction.rollout_is=token",  # old samples are weighted by pi_old / mu
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with each bound; returns the first failing status, or 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=stages.positive, default=60)
    parser.add_argument("--out", type=Path)
    given = sys.argv[1:] if arguments is None else arguments
    settings = [text for text in given if is_setting(text)]  # taken out, or --staleness would take those behind it for bounds
    options, passed_on = parser.parse_known_args([text for text in given if not is_setting(text)])
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    out = (options.out or Path("outputs/arithmetic") / f"seed{options.seed}").absolute()
    for staleness in options.staleness:
        command = [sys.executable, str(stages.QUICKSTART), f"--seed={options.seed}", f"--steps={options.steps}", f"--out={out}"]
        command += ["--name", name_of(staleness), *SETTINGS, f"trainer.max_staleness={staleness}", *passed_on, *settings]
        if status := stages.call_through(command):
            return status
    for staleness in options.staleness:
        logger.info("%s", summary(staleness, out / name_of(staleness) / "metrics.jsonl"))
    return 0


def is_setting(text: str) -> bool:
    """Whether an argument is a setting, and no option."""
    return "=" in text and not text.startswith("-")


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
