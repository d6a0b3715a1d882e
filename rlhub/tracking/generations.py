"""Sample completions on disk: `generations/<split>-<step>.jsonl`, one object per completion.

A file per step, replaced as a whole, so a step that is repeated after a resume leaves no duplicates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rlhub.tracking.tracker import GenerationRow
from rlhub.utils.atomic import write_text

FILE_NAME = re.compile(r"(?P<split>[a-z_]+)-(?P<step>\d+)\.jsonl$")


def write_generations(folder: Path, step: int, split: str, rows: Sequence[GenerationRow]) -> Path:
    """Write the samples of one step; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}-{step:06d}.jsonl"
    lines = [json.dumps({"step": step, **asdict(row)}, ensure_ascii=False) for row in rows]
    # a lone surrogate can come out of a byte-level tokenizer and has no UTF-8 form
    text = "".join(line + "\n" for line in lines).encode("utf-8", errors="replace").decode("utf-8")
    write_text(path, text)
    return path


def read_generations(path: Path) -> list[GenerationRow]:
    """The samples in one file."""
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line:
            value = json.loads(line)
            value.pop("step", None)
            rows.append(GenerationRow(**value))
    return rows


def list_generations(folder: Path) -> list[tuple[str, int, Path]]:
    """(split, step, file) of everything written, steps ascending."""
    found = []
    for path in folder.glob("*.jsonl"):
        if match := FILE_NAME.fullmatch(path.name):
            found.append((match["split"], int(match["step"]), path))
    return sorted(found, key=lambda item: (item[1], item[0]))
