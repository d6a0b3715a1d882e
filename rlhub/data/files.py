"""Rows of parquet and jsonl files, and the cheap checks that run before anything heavy is loaded (no torch here,
and pyarrow only once a parquet file is met)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhub.errors import DataError
from rlhub.registry import suggest

AGENT_NAME = "agent_name"
"""Column that names the workflow of a row's episodes."""


@dataclass(slots=True, kw_only=True)
class Row:
    """One row: its columns, and where it is: number of the row (parquet) or line (jsonl), from 1."""

    values: dict[str, Any]
    file: str
    number: int

    def problem(self, column: str, text: str) -> DataError:
        """An error that names file, row and column."""
        return DataError(f"{self.file}, row {self.number}, column {column!r}: {text}")

    def get(self, column: str) -> Any:
        """The column's value.  DataError when the row has no such column or nothing in it."""
        if column not in self.values:
            raise self.problem(column, f"missing{suggest(column, self.values)}; columns: {', '.join(self.values) or 'none'}")
        value = self.values[column]
        if value is None:
            raise self.problem(column, "is null")
        return value


def file_list(files: str | Sequence[str] | None) -> list[Path]:
    """One path or several, `~` expanded."""
    named = [files] if isinstance(files, (str, Path)) else list(files or ())
    return [Path(name).expanduser() for name in named]


def load_rows(files: str | Sequence[str]) -> list[Row]:
    """All rows of the files, in order.  DataError names a file that is missing, unreadable or empty."""
    paths = file_list(files)
    if not paths:
        raise DataError("no data files are given")
    rows: list[Row] = []
    for path in paths:
        found = _reader(path)(path)
        if not found:
            raise DataError(f"{path} has no rows")
        rows += found
    return rows


def check_files(
    files: str | Sequence[str] | None, prompt_key: str, split: str, columns: Sequence[str] = ("data_source",)
) -> list[str]:
    """Problems that can be seen without reading the rows: missing, unreadable or empty files, missing columns.

    `split` ("train", "val") names the setting in the messages.  `columns` are required beside `prompt_key`.
    """
    return check_columns(files, split, {prompt_key: "data.prompt_key", **dict.fromkeys(columns, "")})


def check_columns(files: str | Sequence[str] | None, split: str, columns: Mapping[str, str]) -> list[str]:
    """As `check_files`; columns: name -> the setting that gave it, or an empty string."""
    setting = f"data.{split}_files"
    paths = file_list(files)
    if not paths:
        return [f"{setting} is not set: give a parquet or jsonl file, or a list of them"]
    problems = []
    for path in paths:
        try:
            found = _columns(path)
        except DataError as error:
            problems.append(f"{setting}: {error}")
            continue
        problems += [
            f"{setting}: {path} has no column {column!r}{f' ({key})' if key else ''}{suggest(column, found)}; "
            f"columns: {', '.join(found) or 'none'}"
            for column, key in columns.items()
            if column not in found
        ]
    return problems


def has_column(files: str | Sequence[str] | None, column: str) -> bool:
    """Whether any of the files has it; one that cannot be read has nothing."""
    for path in file_list(files):
        try:
            if column in _columns(path):
                return True
        except DataError:
            continue
    return False


def _reader(path: Path) -> Callable[[Path], list[Row]]:
    """The reader for the file's suffix, after checking that the file is there."""
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_jsonl}
    if path.suffix not in readers:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; known: .parquet, .jsonl (one JSON object a line)")
    if not path.is_file():
        raise DataError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes)")
    return readers[path.suffix]


def _columns(path: Path) -> list[str]:
    """Column names, from the parquet footer or the first line."""
    if _reader(path) is _read_parquet:
        from rlhub.data.parquet import column_names

        return column_names(path)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                return list(_parse_line(path, number, line))
    raise DataError(f"{path} has no rows")


def _read_parquet(path: Path) -> list[Row]:
    # pyarrow takes 0.3 s to import, and the command line's --help comes by here.
    from rlhub.data.parquet import read_records

    return [Row(values=record, file=str(path), number=number) for number, record in enumerate(read_records(path), 1)]


def _read_jsonl(path: Path) -> list[Row]:
    with path.open("rb") as lines:
        return [
            Row(values=_parse_line(path, number, line), file=str(path), number=number)
            for number, line in enumerate(lines, 1)
            if line.strip()
        ]


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path}, row {number}: not a JSON object on one line: {error}") from error
    except RecursionError as error:
        raise DataError(f"{path}, row {number}: its JSON is nested too deep to be read (about a thousand levels)") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}, row {number}: a JSON object is needed, got {type(record).__name__}")
    return record
