"""Sample completions on disk: `generations/<split>-<step>.jsonl`, one object per completion.

A file per step, replaced as a whole, so a step that is repeated after a resume leaves no duplicates.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhub.tracking.tracker import GenerationRow
from rlhub.utils.atomic import write_text

logger = logging.getLogger(__name__)

FILE_NAME = re.compile(r"(?P<split>[a-z_]+)-(?P<step>\d+)\.jsonl$")


def write_generations(folder: Path, step: int, split: str, rows: Sequence[GenerationRow]) -> Path:
    """Writes the samples of one step, and returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}-{step:06d}.jsonl"
    lines = [json.dumps({"step": step, **asdict(row)}, ensure_ascii=False) for row in rows]
    # a lone surrogate can come out of a byte-level tokenizer and has no UTF-8 form
    text = "".join(line + "\n" for line in lines).encode("utf-8", errors="replace").decode("utf-8")
    write_text(path, text)
    return path


def read_generations(path: Path) -> list[GenerationRow]:
    """Returns the samples in one file.

    A damaged line is skipped with a warning, since samples are for people to read and should not end a run.
    """
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if line:
            try:
                rows.append(_row(json.loads(line)))
            except (ValueError, TypeError, RecursionError) as error:
                logger.warning("%s, line %d: no sample, passed over: %s", path, number, error)
    return rows


def _row(value: Any) -> GenerationRow:
    """Returns a sample from its JSON form.  Raises ValueError or TypeError for anything else."""
    if not isinstance(value, dict):
        raise TypeError(f"a JSON object is needed, got {type(value).__name__}")
    value.pop("step", None)
    row = GenerationRow(**value)
    if not isinstance(row.score, int | float | None):
        raise TypeError(f"score must be a number or null, got {row.score!r:.80}")
    for name in ("prompt", "response", "ground_truth", "data_source", "finish_reason"):
        if not isinstance(value.get(name, ""), str):
            raise TypeError(f"{name} must be text, got {type(value[name]).__name__}")
    return row


def list_generations(folder: Path) -> list[tuple[str, int, Path]]:
    """Returns (split, step, file) of all files, in the order of the steps."""
    found = []
    for path in folder.glob("*.jsonl"):
        if (match := FILE_NAME.fullmatch(path.name)) and path.is_file():
            found.append((match["split"], int(match["step"]), path))
    return sorted(found, key=lambda item: (item[1], item[0]))
