"""The tests' own readers of metrics.jsonl: a line under way is no row, a damaged one is never passed over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.metrics import rows_of, rows_so_far

WHOLE = '{"step": 1, "reward/mean": 0.5}\n'
NEXT = '{"step": 2, "reward/mean": 0.25}\n'


@pytest.mark.parametrize("written", range(len(NEXT)))
def test_a_line_under_way_is_no_row(tmp_path: Path, written: int) -> None:
    """Wherever the writer stands in it.  The control: read as before, all but two of these moments are an error."""
    (tmp_path / "metrics.jsonl").write_text(WHOLE + NEXT[:written])
    assert rows_so_far(tmp_path) == [{"step": 1, "reward/mean": 0.5}]
    if written:
        with pytest.raises(AssertionError, match="in the middle of a line"):
            rows_of(tmp_path)
    if 0 < written < len(NEXT) - 1:
        with pytest.raises(json.JSONDecodeError):
            [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def test_whole_lines_are_rows_and_no_file_is_none(tmp_path: Path) -> None:
    assert rows_so_far(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text(WHOLE + NEXT)
    assert rows_of(tmp_path) == rows_so_far(tmp_path)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2]


def test_a_damaged_line_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(WHOLE[:9] + "\n" + NEXT)
    with pytest.raises(json.JSONDecodeError):
        rows_so_far(tmp_path)
