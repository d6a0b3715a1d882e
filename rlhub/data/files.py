"""Rows of parquet and jsonl files, and the cheap checks that run before anything heavy is loaded.

No torch here, and pyarrow only for a parquet file: it takes 0.3 s to import, and the command line's --help imports this module.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhub.errors import DataError
from rlhub.registry import suggest

if TYPE_CHECKING:
    from pyarrow.parquet import ParquetFile

AGENT_NAME = "agent_name"
"""Column that names the workflow of a row's episodes."""


@dataclass(slots=True, kw_only=True)
class DataRow:
    """A row of a file.  number: of the row (parquet) or line (jsonl), from 1."""

    values: dict[str, Any]
    file: str
    number: int

    def problem(self, column: str, text: str) -> DataError:
        """Returns an error that names file, row and column."""
        return DataError(f"{self.file}, row {self.number}, column {column!r}: {text}")

    def get(self, column: str) -> Any:
        """Returns the column's value.  Raises DataError when the row has no such column or null in it."""
        if column not in self.values:
            raise self.problem(column, f"missing{suggest(column, self.values)}; columns: {', '.join(self.values) or 'none'}")
        value = self.values[column]
        if value is None:
            raise self.problem(column, "is null")
        return value


def file_list(files: str | Sequence[str] | None) -> list[Path]:
    """Returns one path or several as a list, `~` expanded."""
    names = [files] if isinstance(files, (str, Path)) else list(files or ())
    return [Path(name).expanduser() for name in names]


def load_rows(files: str | Sequence[str]) -> list[DataRow]:
    """Returns all rows of the files, in order.  Raises DataError, which names it, for a missing, unreadable or empty file."""
    paths = file_list(files)
    if not paths:
        raise DataError("no data files are given")
    rows: list[DataRow] = []
    for path in paths:
        found = _reader(path)(path)
        if not found:
            raise DataError(f"{path} has no rows")
        rows += found
    return rows


def check_files(
    files: str | Sequence[str] | None, prompt_key: str, split: str, columns: Sequence[str] = ("data_source",)
) -> list[str]:
    """Returns the problems that need no reading of rows: missing, unreadable or empty files, missing columns.

    `split` ("train", "val") names the setting in the messages.  `columns` are required besides `prompt_key`.
    """
    return check_columns(files, split, {prompt_key: "data.prompt_key", **dict.fromkeys(columns, "")})


def check_columns(files: str | Sequence[str] | None, split: str, columns: Mapping[str, str]) -> list[str]:
    """Returns the problems as `check_files` does.  columns: name -> the setting that gave it, or an empty string."""
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
    """Returns True where one of the files has the column; a file that cannot be read has none."""
    for path in file_list(files):
        try:
            if column in _columns(path):
                return True
        except DataError:
            continue
    return False


def texts_of(files: str | Sequence[str] | None, column: str) -> set[str]:
    """Returns the different texts in a column of the files; a file that cannot be read has none."""
    found: set[str] = set()
    for path in file_list(files):
        with suppress(DataError):
            if column not in _columns(path):
                continue
            if _reader(path) is _read_parquet:
                with _parquet_file(path) as file:
                    values = file.read(columns=[column]).column(0).unique().to_pylist()
            else:
                values = [row.values.get(column) for row in _read_jsonl(path)]
            found |= {value for value in values if isinstance(value, str)}
    return found


def check_episode_folders(folders: str | Sequence[str] | None, split: str) -> list[str]:
    """Returns the problems of the data sets that need no reading of frames.  split: names the setting in the messages."""
    return [
        f"data.{split}_files: {folder} has no meta/info.json; with model.vla name folders of LeRobot data sets"
        for folder in file_list(folders)
        if not (folder / "meta" / "info.json").is_file()
    ]


def _reader(path: Path) -> Callable[[Path], list[DataRow]]:
    """Returns the reader for the file's suffix, after checking that the file is there."""
    readers = {".parquet": _read_parquet, ".jsonl": _read_jsonl, ".json": _read_jsonl}
    if path.suffix not in readers:
        raise DataError(f"{path}: unknown kind of file {path.suffix!r}; known: .parquet, .jsonl (one JSON object a line)")
    if not path.is_file():
        raise DataError(f"{path} does not exist" if not path.exists() else f"{path} is not a file")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes)")
    return readers[path.suffix]


def _columns(path: Path) -> list[str]:
    """Returns the column names, from the parquet footer or the first line."""
    if _reader(path) is _read_parquet:
        with _parquet_file(path) as file:
            if file.metadata.num_rows == 0:
                raise DataError(f"{path} has no rows")
            return list(file.schema_arrow.names)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                return list(_parse_line(path, number, line))
    raise DataError(f"{path} has no rows")


def _read_parquet(path: Path) -> list[DataRow]:
    with _parquet_file(path) as file:
        records = file.read().to_pylist()
    return [DataRow(values=record, file=str(path), number=number) for number, record in enumerate(records, 1)]


@contextmanager
def _parquet_file(path: Path) -> Iterator[ParquetFile]:
    """Opens a parquet file; a fault of the file, then and while it is read, is a DataError that names it."""
    import pyarrow as pa  # 0.3 s
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    with file:
        counts = Counter(file.schema_arrow.names)
        if twice := sorted(name for name, count in counts.items() if count > 1):
            raise DataError(
                f"{path} has more than one column of the name {', '.join(map(repr, twice))}; rename or drop all but one"
            )
        try:
            yield file
        except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is damaged: {error}") from error


def _read_jsonl(path: Path) -> list[DataRow]:
    with path.open("rb") as lines:
        return [
            DataRow(values=_parse_line(path, number, line), file=str(path), number=number)
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
