"""The counting task: pictures of shapes, a question about one kind of them, and sets for SFT, RL and validation.

    python recipes/vlm_count/generate.py --out outputs/vlm_count/data --seed 1 [--black]

A picture of 32 x 32 pixels has 2 x 2 places, and near the middle of each nothing, or a circle or a square in red or blue.  The
question names a kind ("how many red circles are there ?") and the answer is 0 to 3, each as often as the others, so an answer
without looking is right one time in four.  The teacher of the warm start counts one too many half of the time (0 after 3):
imitation learns to look, and ends at 0.5.  --black draws the same rows with black pictures.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

DATA_SOURCE = "rlhub/vlm_count"
PLACES, PLACE_SIZE, SHIFT = 2, 16, 3
MOST = 3
COLOURS = {"red": (230, 40, 40), "blue": (50, 80, 230)}
SHAPES = ("circles", "squares")
NUMBERS = tuple(str(number) for number in range(MOST + 1))
WORDS = ("how", "many", *COLOURS, *SHAPES, "are", "there", "?", *NUMBERS)
"""All words of prompts and answers: the vocabulary."""
TEACHER_IS_RIGHT = 0.5
ROWS = {"sft": 4096, "train": 4096, "val": 512}

Kind = tuple[str, str]
KINDS: tuple[Kind, ...] = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)


@dataclass(slots=True, kw_only=True)
class Problem:
    """A picture, the kind that is asked for, and how many of it there are.

    places: the kind on each place that is not empty.  shifts: by how many pixels each is moved down and to the right.
    """

    places: dict[int, Kind]
    shifts: dict[int, tuple[int, int]]
    kind: Kind
    count: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the parquet files; returns the exit status."""
    parser = argparse.ArgumentParser(description="Generate the counting task's data sets.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the parquet files")
    parser.add_argument("--seed", type=int, default=1, help="seed of pictures and teacher (default: %(default)s)")
    parser.add_argument("--black", action="store_true", help="draw black pictures")
    options = parser.parse_args(arguments)
    write_data(options.out, options.seed, black=options.black)
    return 0


def write_data(folder: Path, seed: int, *, black: bool = False) -> None:
    """Writes {sft,train,val}.parquet below `folder`; the same seed gives the same rows."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in ROWS.items():
        problems = [draw_problem(rng) for _ in range(size)]
        rows = [row_of(one, split, black=black) for one in problems]
        if split == "sft":
            rows = [row | {"response": taught(one, rng)} for row, one in zip(rows, problems, strict=True)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")


def draw_problem(rng: random.Random) -> Problem:
    """Draws a kind, its number, and other shapes around them."""
    kind, count = rng.choice(KINDS), rng.randint(0, MOST)
    others = [one for one in KINDS if one != kind]
    shapes = [kind] * count + [rng.choice(others) for _ in range(rng.randint(0, PLACES**2 - count))]
    places = dict(zip(rng.sample(range(PLACES**2), len(shapes)), shapes, strict=True))
    shifts = {place: (rng.randint(-SHIFT, SHIFT), rng.randint(-SHIFT, SHIFT)) for place in places}
    return Problem(places=places, shifts=shifts, kind=kind, count=count)


def taught(problem: Problem, rng: random.Random) -> str:
    """Returns the teacher's answer."""
    return NUMBERS[(problem.count + (rng.random() >= TEACHER_IS_RIGHT)) % len(NUMBERS)]


def row_of(problem: Problem, split: str, *, black: bool = False) -> dict[str, Any]:
    """Returns a row with chat messages and the picture, in the form of parquet's image features."""
    colour, shape = problem.kind
    question = [{"type": "image", "text": None}, {"type": "text", "text": f" how many {colour} {shape} are there ?"}]
    pixels = draw(problem)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question}],
        "images": [{"bytes": png(np.zeros_like(pixels) if black else pixels), "path": None}],
        "reward_model": {"ground_truth": str(problem.count)},
        "extra_info": {"split": split},
    }


def draw(problem: Problem) -> NDArray[np.uint8]:
    """Returns the picture (height, width, 3)."""
    picture = np.full((PLACES * PLACE_SIZE, PLACES * PLACE_SIZE, 3), 235, dtype=np.uint8)
    rows, columns = np.mgrid[:PLACE_SIZE, :PLACE_SIZE] - (PLACE_SIZE - 1) / 2
    inside = {"circles": rows**2 + columns**2 <= 27.0, "squares": np.maximum(abs(rows), abs(columns)) <= 4.6}
    for place, (colour, shape) in problem.places.items():
        top, left = (PLACE_SIZE * axis for axis in divmod(place, PLACES))
        shifted = np.roll(inside[shape], problem.shifts[place], (0, 1))
        picture[top : top + PLACE_SIZE, left : left + PLACE_SIZE][shifted] = COLOURS[colour]
    return picture


def png(pixels: NDArray[np.uint8]) -> bytes:
    """Returns the picture as a PNG file."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="png")
    return out.getvalue()


if __name__ == "__main__":
    sys.exit(main())
