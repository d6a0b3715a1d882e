"""A run's metrics on this machine: metrics.jsonl, the console, and TensorBoard's event files.

metrics.jsonl has one JSON object per step, and each step exactly once, even after a crash.  A line is appended, flushed and
synced when its step is done.  A run that resumes from a checkpoint first drops the later steps (`resume`), because it repeats
them.  Standard JSON has no NaN: such a value is written as null and named under "nonfinite", and `read_metrics` restores it.

The console shows a progress bar and a table of the most important metrics, or plain lines where standard output is no terminal.
It is the only part of the package that writes to standard output during training.  Log lines still go to logging's handlers; on
a terminal rich prints them above the bar.

TensorBoard's event files are in `<run folder>/tensorboard`; `tensorboard --logdir <run folder>` shows them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rlhub.errors import RunFolderError
from rlhub.tracking.tracker import GenerationRow, Metrics, RunInfo, Status, Tracker, load_package, sample_text
from rlhub.utils import faults
from rlhub.utils.atomic import write_all, write_bytes

logger = logging.getLogger(__name__)

NONFINITE = "nonfinite"
"""Key of a line with the metrics that are NaN or infinite, which JSON cannot hold."""
REFRESH_PER_SECOND = 2  # a refresh costs CPU that the workers could use
HEADER_EVERY = 20  # rows, so that the column names stay on the screen
PREVIEW_CHARACTERS = 200


def encode(step: int, metrics: Mapping[str, Any]) -> str:
    """Returns one line of the log without its line break; the keys are sorted after `step`.

    Raises TypeError for a value that is neither a number nor a string.
    """
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
    """Returns the step's metrics, as the inverse of `encode`.  Raises ValueError for any other line."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("no JSON object with an integer 'step'")
    for name, text in row.pop(NONFINITE, {}).items():
        row[name] = float(text)
    return row


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns all whole lines of a log, in the file's order.

    A missing file is an empty log; a damaged line is skipped with a warning.
    """
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
    """Writes a log.  The run folder's lock lets only one process do so at a time.

    last_step: the highest step in the log; -1 when it is empty.
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
        """Appends a step and blocks until it is on the disk.

        Raises ValueError when the step does not follow the last one, and RunFolderError when it cannot be written.
        """
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
        """Drops damaged lines and all steps after `step` (-1: all steps), and returns the dropped steps."""
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
        """Rewinds to `step`, and returns the dropped steps.

        metrics: the step's metrics from its checkpoint, which are appended if the run died before it wrote their line.
        """
        dropped = self.rewind(step)
        if metrics is not None and self.last_step < step:
            self.append(step, metrics)
        return dropped


@dataclass(slots=True, kw_only=True, frozen=True)
class Column:
    """A column of the console's table.  It shows the first of `metrics` that a step has, formatted by `form`."""

    title: str
    metrics: tuple[str, ...]
    form: str


COLUMNS = (
    Column(title="val pass@1", metrics=("val/pass@1",), form="{:.3f}"),
    Column(title="val loss", metrics=("val/loss",), form="{:.3f}"),
    Column(title="val success", metrics=("val/success",), form="{:.3f}"),
    Column(title="success", metrics=("rollout/success",), form="{:.3f}"),
    Column(title="reward", metrics=("reward/mean", "critic/score/mean"), form="{:.3f}"),
    Column(title="loss", metrics=("actor/pg_loss", "train/loss", "loss"), form="{:.4f}"),
    Column(title="length", metrics=("response_length/mean",), form="{:.1f}"),
    Column(title="entropy", metrics=("actor/entropy",), form="{:.3f}"),
    Column(title="kl", metrics=("actor/ppo_kl",), form="{:.1e}"),
    Column(title="mismatch", metrics=("mismatch/kl",), form="{:.1e}"),
    Column(title="grad norm", metrics=("actor/grad_norm", "train/grad_norm", "grad_norm"), form="{:.3f}"),
    Column(title="tokens/s/device", metrics=("perf/throughput",), form="{:.0f}"),
    Column(title="s/step", metrics=("timing_s/step", "perf/time_per_step"), form="{:.2f}"),
)
FAILURE_COUNTERS = re.compile(r"(^|[/_])(skipped|nonfinite|failed|errors?)(_|$|/)")
"""Counters of failures, which are shown below the row whenever they are not 0."""


def cells(metrics: Metrics) -> list[str | None]:
    """Returns the step's text for each of COLUMNS; None where the step has no such metric."""
    found: list[str | None] = []
    for column in COLUMNS:
        values = [metrics[name] for name in column.metrics if name in metrics]
        found.append(column.form.format(values[0]) if values and not isinstance(values[0], str) else None)
    return found


def troubles(metrics: Metrics) -> str:
    """Returns `name value` of every counter of failures that is not 0."""
    found = [
        f"{name} {value:g}"
        for name, value in metrics.items()
        if FAILURE_COUNTERS.search(name) and value and not isinstance(value, str)
    ]
    return ", ".join(found)


class ConsoleTracker(Tracker):
    """Shows a run on the console.

    stream: the output; None: standard output.  terminal: whether the output is a terminal; None: rich finds out.
    """

    def __init__(self, stream: TextIO | None = None, *, terminal: bool | None = None) -> None:
        self._console = Console(file=stream or sys.stdout, force_terminal=terminal, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._used = [False] * len(COLUMNS)
        self._shown = self._rows = 0
        self._total: int | None = None

    def start(self, run: RunInfo) -> None:
        self._total = run.total_steps
        resumed = f", resumed after step {run.resumed_step}" if run.resumed_step is not None else ""
        self._say(f"{run.project}/{run.experiment}{resumed}: {run.folder}")
        if not self._console.is_terminal:
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[phase]}", style="dim", markup=False),
        )
        self._progress = Progress(*columns, console=self._console, refresh_per_second=REFRESH_PER_SECOND)
        self._task = self._progress.add_task(
            run.experiment, total=run.total_steps, completed=run.resumed_step or 0, phase="starting"
        )
        self._progress.start()

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def log(self, step: int, metrics: Metrics) -> None:
        row = cells(metrics)
        self._used = [used or cell is not None for used, cell in zip(self._used, row, strict=True)]
        if self._progress is None:
            self._say(self._line(step, row))
        else:
            self._print_row(step, row)
            self._progress.update(self._task, completed=step)
        if trouble := troubles(metrics):
            self._say(f"  attention: {trouble}")

    def _line(self, step: int, row: Sequence[str | None]) -> str:
        parts = [f"step {step}" + (f"/{self._total}" if self._total else "")]
        parts += [f"{column.title} {cell}" for column, cell in zip(COLUMNS, row, strict=True) if cell is not None]
        return " | ".join(parts)

    def _print_row(self, step: int, row: Sequence[str | None]) -> None:
        """Prints one row of the table, with the column names every HEADER_EVERY rows and when a column is new."""
        shown = [index for index, used in enumerate(self._used) if used]
        table = Table.grid(padding=(0, 2))
        table.add_column(justify="right", min_width=6)
        for index in shown:
            table.add_column(justify="right", min_width=max(7, len(COLUMNS[index].title)))
        if len(shown) != self._shown or self._rows % HEADER_EVERY == 0:
            table.add_row("step", *(COLUMNS[index].title for index in shown), style="bold dim")
        table.add_row(str(step), *(row[index] or "" for index in shown))
        self._console.print(table)
        self._shown = len(shown)
        self._rows += 1

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:
        """Prints one sample, so that nonsense is noticed early; all samples are in generations/."""
        if rows:
            one = rows[0]
            score = "not scored" if one.score is None else f"score {one.score:g}"
            self._say(f"  {split} sample ({score}): {_preview(one.prompt)} -> {_preview(one.response)}")

    def phase(self, name: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, phase=name)

    def finish(self, status: Status, message: str = "") -> None:
        if self._progress is not None:
            self._progress.update(self._task, phase=status)
            self._progress.stop()
            self._progress = None
        self._say(status + (f": {message}" if message else ""))


def _preview(text: str) -> str:
    """Returns the text on one line, without the control characters by which a model could control a terminal."""
    flat = "".join(character if character.isprintable() else " " for character in text)
    flat = " ".join(flat.split())
    return flat if len(flat) <= PREVIEW_CHARACTERS else f"{flat[:PREVIEW_CHARACTERS]} ..."


class TensorboardTracker(Tracker):
    """Writes scalars under their own names.  A resumed run makes TensorBoard drop the steps that are repeated."""

    def start(self, run: RunInfo) -> None:
        load_package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter  # only runs with this tracker load torch for it

        purge = None if run.resumed_step is None else run.resumed_step + 1
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:
        self._writer.add_text(f"samples/{split}", sample_text(rows), step)

    def finish(self, status: Status, message: str = "") -> None:
        self._writer.add_text("status", f"{status} {message}".strip())
        self._writer.close()
