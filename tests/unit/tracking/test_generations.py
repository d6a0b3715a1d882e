"""Sample completions survive whatever a model writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhub.tracking.generations import list_generations, read_generations, write_generations
from rlhub.tracking.tracker import GenerationRow

ODD = "line\nbreak \u2028 \u202e ‮ 🤖 \x00 \x1b[31m </script>"


def test_round_trip_of_odd_text(tmp_path: Path) -> None:
    rows = [
        GenerationRow(prompt=ODD, response="", score=None),
        GenerationRow(prompt="p", response=ODD, score=0.5, extra={"k": [1]}),
    ]
    path = write_generations(tmp_path / "generations", 3, "val", rows)
    assert path.name == "val-000003.jsonl" and read_generations(path) == rows


def test_a_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    path = write_generations(tmp_path, 1, "val", [GenerationRow(prompt="\ud83d", response="x")])
    assert read_generations(path)[0].prompt == "?"


def test_repeated_steps_replace_and_steps_are_listed_in_order(tmp_path: Path) -> None:
    for step, text in ((10, "a"), (2, "b"), (10, "c")):
        write_generations(tmp_path, step, "val", [GenerationRow(prompt="p", response=text)])
    write_generations(tmp_path, 2, "train", [])
    (tmp_path / "notes.jsonl").write_text("")
    found = list_generations(tmp_path)
    assert [(split, step) for split, step, _ in found] == [("train", 2), ("val", 2), ("val", 10)]
    assert read_generations(found[-1][2])[0].response == "c"


DAMAGED = {
    "cut": b'{"step": 1, "prompt": "p", "resp',
    "binary": b"\xff\xfe\x00",
    "a list": b"[1, 2]",
    "nested": b"[" * 100_000,
    "a foreign field": b'{"prompt": "p", "response": "r", "colour": "red"}',
    "no response": b'{"prompt": "p"}',
    "a text for a score": b'{"prompt": "p", "response": "r", "score": "high"}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_costs_itself_and_is_named(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_generations(tmp_path, 1, "val", [GenerationRow(prompt="p", response="r", score=1.0)])
    path.write_bytes(DAMAGED[name] + b"\n" + path.read_bytes())
    assert read_generations(path) == [GenerationRow(prompt="p", response="r", score=1.0)]
    assert "val-000001.jsonl, line 1" in caplog.text


def test_a_folder_in_place_of_a_file_is_no_file_of_samples(tmp_path: Path) -> None:
    (tmp_path / "val-000001.jsonl").mkdir()
    assert list_generations(tmp_path) == []
