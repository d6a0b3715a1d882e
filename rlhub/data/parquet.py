"""Parquet files as Python records, with errors that name the file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rlhub.errors import DataError


def column_names(path: Path) -> list[str]:
    """From the footer alone.  DataError if the file has no rows."""
    with _opened(path) as file:
        if file.metadata.num_rows == 0:
            raise DataError(f"{path} has no rows")
        return list(file.schema_arrow.names)


def read_records(path: Path) -> list[dict[str, Any]]:
    """All rows."""
    with _opened(path) as file:
        try:
            records: list[dict[str, Any]] = file.read().to_pylist()
        except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is damaged: {error}") from error
    return records


def _opened(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    counts = Counter(file.schema_arrow.names)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        file.close()
        raise DataError(f"{path} has more than one column of the name {', '.join(map(repr, twice))}; rename or drop all but one")
    return file
