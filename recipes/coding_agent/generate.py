"""The coding task: functions described in words, an unsure teacher's solutions, and disjoint sets for SFT, RL and validation.

    python recipes/coding_agent/generate.py --out outputs/coding_agent/data --seed 1

A problem reads `plus 7, halve, negate`; the body of the function asked for is `x+=7;x//=2;x=-x`.  What `halve`, `negate` and
`square` mean the teacher does not know: it writes one of three statements for each at random, and after a failed test tries again
in the same way.  Imitation cannot tell which of them is right; running the tests can.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "rlhub/coding_agent"
CLEAR = {"plus": "x+={}", "minus": "x-={}", "times": "x*={}"}
UNSURE = {
    "negate": ("x=-x", "x=~x", "x-=x"),
    "halve": ("x//=2", "x/=2", "x>>=2"),
    "square": ("x*=x", "x+=x", "x**=3"),
}
"""The statements that the teacher takes for each word; the first is right."""
NUM_STEPS = 3
NUMBERS = range(2, 10)
INPUTS = {"train": (-7, 2, 3, 10), "val": (-9, -4, 5, 8, 11)}
"""Arguments of the tests: those of validation are others than those of training."""
NUM_VALIDATION, NUM_TRAINING, NUM_DEMONSTRATED = 128, 4096, 8192
MAX_SHOWN = 9

Step = tuple[str, int]
Problem = tuple[Step, ...]


@dataclass(slots=True, kw_only=True)
class Splits:
    """Problems, no two alike, in random order."""

    validation: list[Problem]
    training: list[Problem]
    demonstrated: list[Problem]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write sft.parquet, train.parquet and val.parquet; returns the exit status."""
    parser = argparse.ArgumentParser(description="Generate the coding task's data sets.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument(
        "--seed", type=int, default=1, help="seed of the teacher (default: %(default)s); the split is always the same"
    )
    parser.add_argument("--demonstrations", type=int, default=NUM_DEMONSTRATED, help="of the teacher (default: %(default)s)")
    options = parser.parse_args(arguments)
    write_data(options.out, options.seed, options.demonstrations)
    return 0


def write_data(folder: Path, seed: int, num_demonstrated: int = NUM_DEMONSTRATED) -> None:
    """`folder`/{sft,train,val}.parquet; the same seed gives the same rows."""
    splits = split_problems(num_demonstrated)
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "sft": [{"messages": demonstrate(problem, rng)} for problem in splits.demonstrated],
        "train": [to_row(problem, "train", index) for index, problem in enumerate(splits.training)],
        "val": [to_row(problem, "val", index) for index, problem in enumerate(splits.validation)],
    }
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")


def split_problems(num_demonstrated: int) -> Splits:
    """Different problems, drawn the same way every time and cut in three."""
    rng, drawn = random.Random(0), dict[Problem, None]()
    while len(drawn) < NUM_VALIDATION + NUM_TRAINING + num_demonstrated:
        drawn[tuple((rng.choice([*CLEAR, *UNSURE]), rng.choice(NUMBERS)) for _ in range(NUM_STEPS))] = None
    problems, end = list(drawn), NUM_VALIDATION + NUM_TRAINING
    return Splits(validation=problems[:NUM_VALIDATION], training=problems[NUM_VALIDATION:end], demonstrated=problems[end:])


def to_messages(problem: Problem) -> list[dict[str, str]]:
    """The description, for example `plus 7, halve, negate`."""
    words = [f"{word} {number}" if word in CLEAR else word for word, number in problem]
    return [{"role": "user", "content": ", ".join(words)}]


def to_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """A row to learn from by tests: arguments, and the results as Python writes them."""
    inputs = INPUTS[split]
    tests = {"inputs": inputs, "wants": [run_body(body_of(problem), number) for number in inputs]}
    return {
        "prompt": to_messages(problem),
        "data_source": DATA_SOURCE,
        "reward_model": {"style": "rule", "ground_truth": json.dumps(tests)},
        "extra_info": {"split": split, "index": index},
    }


def body_of(problem: Problem, rng: random.Random | None = None) -> str:
    """The right body of the function, or with `rng` one that the teacher takes for it."""
    statements = []
    for word, number in problem:
        if word in CLEAR:
            statements.append(CLEAR[word].format(number))
        else:
            statements.append(UNSURE[word][0] if rng is None else rng.choice(UNSURE[word]))
    return ";".join(statements)


def run_body(body: str, argument: int) -> str:
    """What a function with this body returns, or the name of its error, for bodies that this file made."""
    names: dict[str, Any] = {"x": argument}
    try:
        exec(body, names)
    except TypeError as error:
        return type(error).__name__
    return repr(names["x"])


def feedback(argument: int, got: str, want: str) -> str:
    """What the author of a function reads of a test that has failed, for example `f(3) is 2.0, not 2`."""
    return f"f({argument}) is {got[:MAX_SHOWN]}, not {want[:MAX_SHOWN]}"


def demonstrate(problem: Problem, rng: random.Random) -> list[dict[str, str]]:
    """A conversation with the teacher: a try, and after a failed test another."""
    tried, right = body_of(problem, rng), body_of(problem)
    talk = [*to_messages(problem), {"role": "assistant", "content": tried}]
    for argument in INPUTS["train"]:
        got, want = run_body(tried, argument), run_body(right, argument)
        if got != want:
            said = {"role": "user", "content": feedback(argument, got, want)}
            return [*talk, said, {"role": "assistant", "content": body_of(problem, rng)}]
    return talk


if __name__ == "__main__":
    sys.exit(main())
