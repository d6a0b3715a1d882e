"""The arithmetic task: the sum of six dice, a noisy teacher's solutions, and disjoint sets for SFT, RL and validation.

    python recipes/arithmetic/generate.py --out outputs/arithmetic/data --seed 1

A problem reads `4 +1 +6 +3 +5 +2 =`.  The teacher answers in one of two ways:

    hasty    21                one number: a guess within 3 of the sum, right one time in seven
    worked   4 5 11 14 19 21   the running totals; each addition slips with a small probability

Only the last number counts.  Guesses and slips are drawn at random, so longer imitation does not make the answers better:
what is left to find is that working pays, and that working carefully pays more.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "rlhub/arithmetic"
NUM_DICE = 6
NUM_FACES = 6
SLIPS = (-2, -1, 1, 2)
LARGEST_NUMBER = NUM_DICE * NUM_FACES + (NUM_DICE - 1) * max(SLIPS)
"""The largest number a teacher can write: it bounds the vocabulary."""
NUM_VALIDATION = 1024
NUM_TRAINING = 8192

Problem = tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Teacher:
    """How the demonstrations are written."""

    worked_share: float = 0.4
    """Probability of a worked solution."""
    slip_rate: float = 0.06
    """Probability that one addition of a worked solution is off by one or two; what follows builds on the wrong total."""
    guess_spread: int = 3
    """Hasty answers are uniform within this distance of the sum."""


@dataclass(slots=True, kw_only=True)
class Splits:
    """Problems, no two alike, in random order."""

    validation: list[Problem]
    training: list[Problem]
    demonstrated: list[Problem]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write sft.parquet, train.parquet and val.parquet; returns the exit status."""
    parser = argparse.ArgumentParser(description="Generate the arithmetic task's data sets.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the teacher (default: %(default)s); the split is always the same"
    )
    options = parser.parse_args(arguments)
    write_data(options.out, options.seed)
    return 0


def write_data(folder: Path, seed: int, teacher: Teacher | None = None) -> None:
    """`folder`/{sft,train,val}.parquet; the same seed gives the same rows."""
    splits = split_problems()
    style = teacher or Teacher()
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "sft": [{"prompt": to_prompt(problem), "response": demonstrate(problem, style, rng)} for problem in splits.demonstrated],
        "train": [to_row(problem, "train", index) for index, problem in enumerate(splits.training)],
        "val": [to_row(problem, "val", index) for index, problem in enumerate(splits.validation)],
    }
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def split_problems() -> Splits:
    """All 6^6 problems, shuffled the same way every time and cut in three."""
    problems = list(itertools.product(range(1, NUM_FACES + 1), repeat=NUM_DICE))
    random.Random(0).shuffle(problems)
    end = NUM_VALIDATION + NUM_TRAINING
    return Splits(validation=problems[:NUM_VALIDATION], training=problems[NUM_VALIDATION:end], demonstrated=problems[end:])


def to_prompt(problem: Problem) -> str:
    """(4, 1, 6) -> `4 +1 +6 =`."""
    first, *rest = problem
    return " ".join([str(first), *(f"+{face}" for face in rest), "="])


def to_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """A row to learn from by reward."""
    return {
        "prompt": to_prompt(problem),
        "data_source": DATA_SOURCE,
        "reward_model": {"style": "rule", "ground_truth": str(sum(problem))},
        "extra_info": {"split": split, "index": index},
    }


def demonstrate(problem: Problem, teacher: Teacher, rng: random.Random) -> str:
    """The teacher's response."""
    if rng.random() < teacher.worked_share:
        return " ".join(str(total) for total in work_out(problem, teacher.slip_rate, rng))
    return str(max(0, sum(problem) + rng.randint(-teacher.guess_spread, teacher.guess_spread)))


def work_out(problem: Problem, slip_rate: float, rng: random.Random) -> list[int]:
    """Running totals, beginning with the first die."""
    totals = [problem[0]]
    for face in problem[1:]:
        slip = rng.choice(SLIPS) if rng.random() < slip_rate else 0
        totals.append(max(0, totals[-1] + face + slip))
    return totals


if __name__ == "__main__":
    sys.exit(main())
