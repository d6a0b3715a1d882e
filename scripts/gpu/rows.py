"""Rows of results: one figure each, with the baseline of the same run and the bound that it should keep.

A section writes each row as a line of JSON the moment that it has it, so that the rows of a section that is ended by its time
limit are not lost.  This module loads the standard library only.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "missed", "measured", "not there", "skipped", "failed"]
"""The status of a row.

ok, missed: the bound holds, or not.  measured: the row has no bound, or its bound is for a GPU at full size.  not there: the
project, the software or the machine lacks it.  skipped: it was not tried.  failed: it ended with an error or by its time limit.
"""
BAD: tuple[Status, ...] = ("missed", "failed")
MAX_NOTE = 300
OUT_OF_MEMORY = "OutOfMemoryError"
"""The class of torch's error; named here, because this module does not load torch."""


class Skip(Exception):  # noqa: N818 - it is no error
    """The rest of a section is not tried, for the reason in its text."""


class NotThere(Exception):  # noqa: N818 - it is no error
    """What a row measures is missing here, for the reason in its text."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Row:
    """One figure.

    section: the section's letter.
    baseline: the same figure of the baseline, in the same unit, from the same run.
    bound: words for the bound; "" without one.
    """

    section: str
    what: str
    value: float | None = None
    unit: str = ""
    baseline: float | None = None
    bound: str = ""
    status: Status = "measured"
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Returns the value as a multiple of the baseline, or None without a baseline."""
        return self.value / self.baseline if self.value is not None and self.baseline else None


class Recorder:
    """Writes the rows of one section.

    file: where they are appended, a line of JSON each.
    judged: False keeps bounds of speed from being judged, on a CPU or at a small size; bounds of correctness always are.
    """

    def __init__(self, section: str, file: Path, *, judged: bool) -> None:
        self.section, self.file, self.judged = section, file, judged

    def add(self, what: str, **fields: object) -> None:
        """Writes one row.  fields: the other fields of Row."""
        row = Row(section=self.section, what=what, **fields)  # type: ignore[arg-type]
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")

    def measured(self, what: str, value: float, unit: str, *, baseline: float | None = None, note: str = "") -> None:
        """Writes a figure that has no bound."""
        self.add(what, value=value, unit=unit, baseline=baseline, note=note)

    def compare(
        self,
        what: str,
        value: float,
        unit: str,
        *,
        baseline: float,
        at_least: float = 0.0,
        at_most: float = math.inf,
        note: str = "",
    ) -> None:
        """Writes a figure of speed whose ratio to the baseline has a bound."""
        ratio = value / baseline if baseline else math.nan
        bound = f"at least {at_least:g}x" if at_most == math.inf else f"at most {at_most:g}x"
        status: Status = "ok" if at_least <= ratio <= at_most else "missed"
        self.add(
            what,
            value=value,
            unit=unit,
            baseline=baseline,
            bound=bound,
            status=status if self.judged else "measured",
            note=note,
        )

    def check(
        self,
        what: str,
        value: float,
        unit: str = "",
        *,
        at_least: float = -math.inf,
        at_most: float = math.inf,
        baseline: float | None = None,
        note: str = "",
    ) -> None:
        """Writes a figure of correctness, whose bound is judged on every device and at every size."""
        bounds = [f"at least {at_least:g}"] * (at_least != -math.inf) + [f"at most {at_most:g}"] * (at_most != math.inf)
        status: Status = "ok" if at_least <= value <= at_most else "missed"
        self.add(what, value=value, unit=unit, baseline=baseline, bound=", ".join(bounds), status=status, note=note)

    @contextmanager
    def trying(self, what: str) -> Iterator[None]:
        """Turns an error inside the context into a row, so that the section goes on with its next figure."""
        try:
            yield
        except NotThere as error:
            self.add(what, status="not there", note=str(error))
        except Skip as error:
            self.add(what, status="skipped", note=str(error))
        except Exception as error:  # noqa: BLE001 - one figure's failure must not cost the others
            self.add(what, status="failed", note=described(error))


def described(error: BaseException) -> str:
    """Returns an error as one line for a note."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    name = "out of GPU memory" if type(error).__name__ == OUT_OF_MEMORY else type(error).__name__
    return f"{name}: {lines[0] if lines else ''}"[:MAX_NOTE]


def read_rows(file: Path) -> list[Row]:
    """Returns the rows of a file, without a last line that was cut off; [] for a file that is not there."""
    if not file.is_file():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(Row(**json.loads(line)))
        except ValueError:  # the section was ended while it wrote
            break
    return rows


def number(value: float | None) -> str:
    """Returns a figure with about three digits, "" for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:.2e}"


HEADER = ("", "what", "value", "baseline", "ratio", "bound", "status", "note")


def cells(row: Row) -> tuple[str, ...]:
    """Returns a row's cells, in the order of HEADER."""
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
    value = f"{number(row.value)} {row.unit}".strip()
    return row.section, row.what, value, number(row.baseline), ratio, row.bound, row.status, row.note


def markdown(rows: Iterable[Row]) -> str:
    """Returns the rows as a Markdown table."""
    lines = [HEADER, ("---",) * len(HEADER), *(tuple(cell.replace("|", "/") for cell in cells(row)) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a table of aligned columns for a terminal; the notes, which are longest, come last."""
    lines = [HEADER, *map(cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER) - 1)]
    texts = ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]) for line in lines]
    return "".join(f"{text.rstrip()}\n" for text in texts)
