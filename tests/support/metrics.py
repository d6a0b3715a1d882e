"""The rows of a run's metrics.jsonl, as tests read them.

Two readers, because a run that is still going may be in the middle of a line: nothing of that line is a row yet, while a run
that has ended must have left whole lines only.  Unlike the product's reader neither passes over a damaged line.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows_so_far(folder: Path) -> list[dict[str, Any]]:
    """Of a run that may be writing at this moment: its whole lines, none before the file is there."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Of a run that has ended: the last line is whole too."""
    assert (folder / "metrics.jsonl").read_text()[-1:] in ("", "\n"), "the run ended in the middle of a line"
    return rows_so_far(folder)
