"""GSM8K as published (train.jsonl, test.jsonl with `question` and `answer`) -> the parquet rows that rlhub trains on.

    python recipes/gsm8k/preprocess.py --source <folder with train.jsonl and test.jsonl> --out data/gsm8k

Each row: `prompt` (chat messages), `data_source`, `reward_model` {style, ground_truth}, `extra_info` {split, index, question,
answer}.  The files are those of https://github.com/openai/grade-school-math (Cobbe et al. 2021, arXiv 2110.14168).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhub.errors import DataError

logger = logging.getLogger("gsm8k")

DATA_SOURCE = "openai/gsm8k"
INSTRUCTION = 'Reason step by step, then give the final answer as a number after "####".'
SPLITS = ("train", "test")


def main(arguments: list[str] | None = None) -> int:
    """Write `<out>/train.parquet` and `<out>/test.parquet`; returns the exit status."""
    parser = argparse.ArgumentParser(description="Turn the published GSM8K jsonl files into rlhub's parquet rows.")
    parser.add_argument("--source", type=Path, required=True, help="folder with train.jsonl and test.jsonl")
    parser.add_argument(
        "--out", type=Path, default=Path("data/gsm8k"), help="folder for the parquet files (default: %(default)s)"
    )
    parser.add_argument("--instruction", default=INSTRUCTION, help="sentence put after each question")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        tables = {split: read_split(options.source / f"{split}.jsonl", split, options.instruction) for split in SPLITS}
    except DataError as error:
        logger.error("%s", error)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    for split, rows in tables.items():
        path = options.out / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        logger.info("%s: %d rows", path, len(rows))
    return 0


def read_split(path: Path, split: str, instruction: str) -> list[dict[str, Any]]:
    """The rows of one published file.  DataError names file and line of anything unusable."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; --source must be the folder with train.jsonl and test.jsonl")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            published = json.loads(line)
            rows.append(make_row(published["question"], published["answer"], split, number - 1, instruction))
        except (LookupError, AttributeError, TypeError, ValueError) as error:
            raise DataError(
                f'{path}, line {number}: expected {{"question", "answer"}} with "#### <number>": {error!r}'
            ) from error
    if not rows:
        raise DataError(f"{path} has no rows")
    return rows


def make_row(question: str, answer: str, split: str, index: int, instruction: str) -> dict[str, Any]:
    """One row; the ground truth is what follows `####`, without thousands separators."""
    truth = answer.rsplit("####", 1)[1].strip().replace(",", "")
    float(truth)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{question} {instruction}".strip()}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


if __name__ == "__main__":
    sys.exit(main())
