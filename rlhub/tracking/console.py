"""The console: a progress bar and a table of the metrics that matter; plain lines where output is no terminal.

The only part of the package that writes to standard output while training.  Log lines keep going to logging's handlers;
on a terminal rich prints them above the bar.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from rlhub.tracking.tracker import GenerationRow, Metrics, RunInfo, Status, Tracker

REFRESH_PER_SECOND = 2  # a refresh costs CPU that the workers could use
HEADER_EVERY = 20  # rows; keeps the column names in sight
PREVIEW_CHARACTERS = 200


@dataclass(slots=True, kw_only=True, frozen=True)
class Column:
    """A column shows the first of `metrics` that a step has."""

    title: str
    metrics: tuple[str, ...]
    form: str


COLUMNS = (
    Column(title="val pass@1", metrics=("val/pass@1",), form="{:.3f}"),
    Column(title="val loss", metrics=("val/loss",), form="{:.3f}"),
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
ALWAYS_SEEN = re.compile(r"(^|[/_])(skipped|nonfinite|failed|errors?)(_|$|/)")
"""Counters of things that should not happen: shown under the row whenever they are not 0."""


def cells(metrics: Metrics) -> list[str | None]:
    """Returns the step's value under each of COLUMNS, None where it has none."""
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
        if ALWAYS_SEEN.search(name) and value and not isinstance(value, str)
    ]
    return ", ".join(found)


class ConsoleTracker(Tracker):
    """Shows a run on the console.  stream: standard output unless a test says otherwise."""

    def __init__(self, stream: TextIO | None = None, *, terminal: bool | None = None) -> None:
        self._console = Console(file=stream or sys.stdout, force_terminal=terminal, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._seen = [False] * len(COLUMNS)
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
        self._seen = [seen or cell is not None for seen, cell in zip(self._seen, row, strict=True)]
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
        """Prints one line of the table; the names come again every HEADER_EVERY rows and when a column appears."""
        shown = [index for index, seen in enumerate(self._seen) if seen]
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
        """Prints one sample, so that nonsense shows early; the rest is in generations/."""
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
    """Returns the text on one line, without control characters that a model could steer a terminal with."""
    flat = "".join(character if character.isprintable() else " " for character in text)
    flat = " ".join(flat.split())
    return flat if len(flat) <= PREVIEW_CHARACTERS else f"{flat[:PREVIEW_CHARACTERS]} ..."
