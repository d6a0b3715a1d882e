"""Preference pairs for the arithmetic task: a right worked answer is chosen, a wrong answer rejected.

    python recipes/dpo/pairs.py --out outputs/arithmetic/pairs --seed 1

    prompt      4 +1 +6 +3 +5 +2 =
    chosen      4 5 11 14 19 21
    rejected    23                   half of them a hasty guess that is wrong
    rejected    4 5 11 15 20 22      half of them worked with a slip

The answers are the warm start's teacher's, drawn until they are right or wrong as they should be.  Training pairs are on the
8,192 problems of reinforcement learning, validation pairs on the 1,024 of its validation: nobody was shown their solutions.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes.arithmetic.generate import Problem, Teacher, demonstrate, split_problems, to_prompt

HASTY, WORKED = Teacher(worked_share=0.0), Teacher(worked_share=1.0)
FLAWLESS = dataclasses.replace(WORKED, slip_rate=0.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write train.parquet and val.parquet; returns the exit status."""
    parser = argparse.ArgumentParser(description="Generate the arithmetic task's preference pairs.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--seed", type=int, default=1, help="seed of the answers (default: %(default)s)")
    options = parser.parse_args(arguments)
    write_pairs(options.out, options.seed)
    return 0


def write_pairs(folder: Path, seed: int) -> None:
    """`folder`/{train,val}.parquet; the same seed gives the same rows."""
    splits, rng = split_problems(), random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems in (("train", splits.training), ("val", splits.validation)):
        pq.write_table(pa.Table.from_pylist([to_pair(problem, rng) for problem in problems]), folder / f"{name}.parquet")


def to_pair(problem: Problem, rng: random.Random) -> dict[str, str]:
    """One row."""
    return {
        "prompt": to_prompt(problem),
        "chosen": demonstrate(problem, FLAWLESS, rng),
        "rejected": wrong_answer(problem, rng.choice((HASTY, WORKED)), rng),
    }


def wrong_answer(problem: Problem, teacher: Teacher, rng: random.Random) -> str:
    """What the teacher says when the last number is not the sum."""
    while True:
        answer = demonstrate(problem, teacher, rng)
        if int(answer.split()[-1]) != sum(problem):
            return answer


if __name__ == "__main__":
    sys.exit(main())
