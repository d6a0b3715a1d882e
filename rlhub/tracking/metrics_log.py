"""metrics.jsonl: one JSON object per step, each step exactly once, whatever happened in between.

A line is appended, flushed and synced when its step is done.  A run that resumes from a checkpoint first drops the steps
after it (`resume`), because it is about to do them again.  Standard JSON has no NaN: such a value is written as null and
named under "nonfinite", and `read_metrics` gives it back.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlhub.errors import RunFolderError
from rlhub.utils import faults
from rlhub.utils.atomic import write_all, write_bytes

logger = logging.getLogger(__name__)

NONFINITE = "nonfinite"


def encode(step: int, metrics: Mapping[str, Any]) -> str:
    """Returns one line of the log, without the line break; keys are sorted behind `step`.  TypeError on a value that is no
    scalar."""
    row: dict[str, Any] = {"step": int(step)}
    bad: dict[str, str] = {}
    for name in sorted(metrics):
        if name in ("step", NONFINITE):
            raise ValueError(f"a metric cannot be called {name!r}")
        value = metrics[name]
        if isinstance(value, np.generic):
            value = value.item()
        if not isinstance(value, bool | int | float | str):
            raise TypeError(f"metric {name!r} of step {step} is a {type(value).__name__}; expected a number or a string")
        if isinstance(value, float) and not math.isfinite(value):
            bad[name] = str(value)
            value = None
        row[name] = value
    if bad:
        row[NONFINITE] = bad
    return json.dumps(row, allow_nan=False)


def decode(line: str | bytes) -> dict[str, Any]:
    """Inverts `encode`.  ValueError when the line is not one."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("no JSON object with an integer 'step'")
    for name, text in row.pop(NONFINITE, {}).items():
        row[name] = float(text)
    return row


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns all whole lines of a log, in file order; a missing file is an empty log, a damaged line is skipped with a
    warning."""
    if not path.exists():
        return []
    return [row for _, row in _lines(path)]


def _lines(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), 1):
        if not line.endswith(b"\n"):
            break  # the process ended while writing it
        try:
            found.append((line, decode(line)))
        except ValueError as error:
            logger.warning("%s line %d is skipped: %s", path, number, error)
    return found


class MetricsLog:
    """Writes a log; one process at a time (the run folder's lock sees to that).

    last_step: the highest step in the log, -1 when it is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        rows = read_metrics(path)
        self.last_step: int = max((row["step"] for row in rows), default=-1)
        self._drop_half_line()

    def _drop_half_line(self) -> None:
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            logger.warning("%s: dropped a half-written last line of %d bytes", self.path, len(content) - whole)
            os.truncate(self.path, whole)

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds a step and waits until it is on the disk.  ValueError when the step is not after the last one,
        RunFolderError when it cannot be written."""
        if step <= self.last_step:
            raise ValueError(f"step {step} comes after step {self.last_step} in {self.path}; each step is logged once, in order")
        line = encode(step, metrics) + "\n"
        try:
            faults.at("metrics.write")
            self._write(line.encode("utf-8"))
        except OSError as error:
            raise RunFolderError(
                f"cannot write the metrics of step {step} to {self.path}: {error.strerror or error}; free space or make the "
                "folder writable, and start the same command again: it goes on from the newest checkpoint"
            ) from error
        self.last_step = step

    def _write(self, line: bytes) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            write_all(descriptor, line)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rewind(self, step: int) -> list[int]:
        """Drops all steps after `step` (-1: all), and damaged lines; returns the steps dropped."""
        if not self.path.exists():
            return []
        lines = _lines(self.path)
        kept: dict[int, bytes] = {row["step"]: line for line, row in lines if row["step"] <= step}
        content = b"".join(kept[number] for number in sorted(kept))
        if content != self.path.read_bytes():
            write_bytes(self.path, content)
        self.last_step = max(kept, default=-1)
        return [row["step"] for _, row in lines if row["step"] > step]

    def resume(self, step: int, metrics: Mapping[str, Any] | None = None) -> list[int]:
        """Continues after `step`: rewinds, and if the run died between its checkpoint and its line, adds the line from the
        `metrics` that the checkpoint holds.  Returns the steps dropped."""
        dropped = self.rewind(step)
        if metrics is not None and self.last_step < step:
            self.append(step, metrics)
        return dropped
