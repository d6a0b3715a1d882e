"""The tool task: products of three-digit numbers, a noisy teacher's solutions, and disjoint sets for SFT, RL and validation.

    python recipes/tool_agent/generate.py --out outputs/tool_agent/data --seed 1

A problem reads `347*582=`.  The model is far too small to multiply in its head.  The teacher answers in one of two ways:

    guessed   204831      the first two digits are right, the others are not known
    called    <tool_call>{"name": "calculator", "arguments": {"expression": "347*582"}}</tool_call>, then what it answered

In a share of the calls one digit is copied wrong.  What is left to find is that calling pays, and that copying carefully
pays more.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "rlhub/tool_agent"
CALL = ('<tool_call>{"name": "calculator", "arguments": {"expression": "', '"}}</tool_call>')
"""What stands around the expression in a call."""
SMALLEST, LARGEST = 100, 999
NUM_VALIDATION = 256
NUM_TRAINING = 4096
NUM_DEMONSTRATED = 8192

Problem = tuple[int, int]


@dataclass(slots=True, kw_only=True)
class Teacher:
    """How the demonstrations are written."""

    call_share: float = 0.4
    """Probability of a solution with the calculator."""
    slip_rate: float = 0.1
    """Probability that a digit of the copied expression is wrong."""


@dataclass(slots=True, kw_only=True)
class Splits:
    """Problems, no two alike, in random order."""

    validation: list[Problem]
    training: list[Problem]
    demonstrated: list[Problem]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write sft.parquet, train.parquet and val.parquet; returns the exit status."""
    parser = argparse.ArgumentParser(description="Generate the tool task's data sets.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the teacher (default: %(default)s); the split is always the same"
    )
    parser.add_argument("--demonstrations", type=int, default=NUM_DEMONSTRATED, help="of the teacher (default: %(default)s)")
    options = parser.parse_args(arguments)
    write_data(options.out, options.seed, options.demonstrations)
    return 0


def write_data(folder: Path, seed: int, num_demonstrated: int = NUM_DEMONSTRATED, teacher: Teacher | None = None) -> None:
    """`folder`/{sft,train,val}.parquet; the same seed gives the same rows."""
    splits = split_problems(num_demonstrated)
    style = teacher or Teacher()
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "sft": [{"messages": demonstrate(problem, style, rng)} for problem in splits.demonstrated],
        "train": [to_row(problem, "train", index) for index, problem in enumerate(splits.training)],
        "val": [to_row(problem, "val", index) for index, problem in enumerate(splits.validation)],
    }
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def split_problems(num_demonstrated: int) -> Splits:
    """Different problems, drawn the same way every time and cut in three."""
    count = LARGEST - SMALLEST + 1
    drawn = random.Random(0).sample(range(count * count), NUM_VALIDATION + NUM_TRAINING + num_demonstrated)
    problems = [(SMALLEST + number // count, SMALLEST + number % count) for number in drawn]
    end = NUM_VALIDATION + NUM_TRAINING
    return Splits(validation=problems[:NUM_VALIDATION], training=problems[NUM_VALIDATION:end], demonstrated=problems[end:])


def to_messages(problem: Problem) -> list[dict[str, str]]:
    """(347, 582) -> the question `347*582=`."""
    return [{"role": "user", "content": f"{problem[0]}*{problem[1]}="}]


def to_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """A row to learn from by reward."""
    return {
        "prompt": to_messages(problem),
        "data_source": DATA_SOURCE,
        "reward_model": {"style": "rule", "ground_truth": str(problem[0] * problem[1])},
        "extra_info": {"split": split, "index": index},
    }


def demonstrate(problem: Problem, teacher: Teacher, rng: random.Random) -> list[dict[str, str]]:
    """A conversation with the teacher."""
    left, right = problem
    if rng.random() >= teacher.call_share:
        return [*to_messages(problem), {"role": "assistant", "content": guess(left * right, rng)}]
    expression = f"{left}*{right}"
    if rng.random() < teacher.slip_rate:
        expression = slipped(expression, rng)
    result = str(int(expression[:3]) * int(expression[4:]))
    return [
        *to_messages(problem),
        {"role": "assistant", "content": expression.join(CALL)},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": result},
    ]


def guess(product: int, rng: random.Random) -> str:
    """As long as the product, and right in the first two digits."""
    text = str(product)
    return text[:2] + "".join(rng.choice("0123456789") for _ in text[2:])


def slipped(expression: str, rng: random.Random) -> str:
    """One digit is another one; numbers keep their three digits."""
    position = rng.choice([0, 1, 2, 4, 5, 6])
    digit = rng.choice([digit for digit in "123456789" if digit != expression[position]])
    return expression[:position] + digit + expression[position + 1 :]


if __name__ == "__main__":
    sys.exit(main())
