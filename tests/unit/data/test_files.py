"""Reading rows: every unusable file is a DataError that says which and why, and is found by check_files before reading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhub.data import check_files, load_rows, texts_of
from rlhub.errors import DataError

ROWS = [
    {"prompt": "1+1=", "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"index": 0}},
    {"prompt": "é\U0001f600", "data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "3"}, "extra_info": None},
]


def write(path: Path, rows: list[dict]) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_rows_and_their_places(suffix: str, tmp_path: Path) -> None:
    first, second = write(tmp_path / f"a{suffix}", ROWS), write(tmp_path / f"b{suffix}", ROWS[:1])
    rows = load_rows([first, second])
    assert [row.values for row in rows] == [*ROWS, ROWS[0]]
    assert [(row.file, row.number) for row in rows] == [(first, 1), (first, 2), (second, 1)]
    assert [row.values for row in load_rows(first)] == ROWS
    assert check_files([first, second], "prompt", "train") == []


def test_jsonl_skips_blank_lines_and_counts_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "x"}\n\n{"prompt": "y"}\n')
    assert [row.number for row in load_rows(str(tmp_path / "a.jsonl"))] == [2, 4]


BAD = {
    "absent.parquet": (None, "does not exist"),
    "zero.parquet": (b"", "empty"),
    "zero.jsonl": (b"", "empty"),
    "blank.jsonl": (b"\n\n", "no rows"),
    "noise.parquet": (b"this is not parquet", "not a readable parquet"),
    "noise.jsonl": (b"{'prompt': 1}\n", "row 1: not a JSON object"),
    "list.jsonl": (b"[1, 2]\n", "row 1: a JSON object is needed, got list"),
    "latin.jsonl": ('{"prompt": "é"}'.encode("latin-1"), "row 1: not a JSON object"),
    "deep.jsonl": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "row 1: .*nested too deep"),
    "table.csv": (b"prompt\nx\n", "unknown kind of file '.csv'"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_unusable_files(name: str, tmp_path: Path) -> None:
    content, message = BAD[name]
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_rows(str(path))
    assert str(path) in str(caught.value)
    problems = check_files(str(path), "prompt", "val")
    assert len(problems) == 1 and problems[0].startswith("data.val_files: ") and str(path) in problems[0]


def test_other_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 2: not a JSON object"):
        (tmp_path / "half.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y')
        load_rows(str(tmp_path / "half.jsonl"))
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    with pytest.raises(DataError, match="no rows"):
        load_rows(str(empty))
    assert "no rows" in check_files(str(empty), "prompt", "train")[0]
    write(tmp_path / "flipped.parquet", ROWS * 50)
    raw = bytearray((tmp_path / "flipped.parquet").read_bytes())
    raw[4:200] = b"\xff" * 196
    (tmp_path / "flipped.parquet").write_bytes(raw)
    with pytest.raises(DataError, match="damaged"):
        load_rows(str(tmp_path / "flipped.parquet"))
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(DataError, match="not a file"):
        load_rows(str(tmp_path / "folder.parquet"))


def test_missing_columns_are_named_with_the_nearest(tmp_path: Path) -> None:
    for suffix in (".parquet", ".jsonl"):
        path = write(tmp_path / f"a{suffix}", [{"prompts": "x", "source": "s"}])
        problems = check_files(path, "prompt", "train")
        assert len(problems) == 2
        assert "'prompt' (data.prompt_key); did you mean 'prompts'?" in problems[0] and "'data_source'" in problems[1]
        assert check_files(path, "prompts", "train", columns=()) == []


def test_no_files_at_all() -> None:
    assert check_files(None, "prompt", "train")[0].startswith("data.train_files is not set")
    assert check_files([], "prompt", "val")[0].startswith("data.val_files is not set")
    with pytest.raises(DataError, match="no data files"):
        load_rows([])


def test_importing_loads_nothing_heavy() -> None:
    code = "import sys, rlhub.data; print(sorted({'torch', 'ray', 'transformers', 'tensordict', 'pyarrow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    """Of two columns of one name the last would win, whichever was meant."""
    path = tmp_path / "twice.parquet"
    columns = [pa.array(["1+1="]), pa.array(["sums"]), pa.array(["other"]), pa.array(["2+2="])]
    pq.write_table(pa.Table.from_arrays(columns, names=["prompt", "data_source", "data_source", "prompt"]), path)
    with pytest.raises(DataError, match=r"twice\.parquet.*more than one column.*'data_source', 'prompt'"):
        load_rows(str(path))
    (problem,) = check_files(str(path), "prompt", "train")
    assert "more than one column" in problem


def test_the_texts_of_a_column(tmp_path: Path) -> None:
    rows = [{"agent_name": "a"}, {"agent_name": None}, {"agent_name": "b"}, {"agent_name": "a"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text('{"agent_name": "c"}\n{"agent_name": 3}\n')
    (tmp_path / "other.jsonl").write_text('{"prompt": "a"}\n')
    files = [str(tmp_path / name) for name in ("rows.parquet", "rows.jsonl", "other.jsonl", "missing.parquet")]
    assert texts_of(files, "agent_name") == {"a", "b", "c"} and texts_of(None, "agent_name") == set()
