"""metrics.jsonl: each step once, whatever was killed in between."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhub.errors import RunFolderError
from rlhub.tracking.metrics_log import MetricsLog, read_metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_appends_and_reads_back(path: Path) -> None:
    log = MetricsLog(path)
    assert log.last_step == -1
    log.append(0, {"val/pass@1": 0.25})
    log.append(1, {"b": np.float32(0.5), "a": 3, "who": "x\ud800\n", "up": True})
    assert read_metrics(path) == [{"step": 0, "val/pass@1": 0.25}, {"step": 1, "a": 3, "b": 0.5, "up": True, "who": "x\ud800\n"}]
    assert MetricsLog(path).last_step == 1


@given(value=st.floats())
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_floats_survive_bit_for_bit_in_standard_json(tmp_path_factory: pytest.TempPathFactory, value: float) -> None:
    path = tmp_path_factory.mktemp("log") / "m.jsonl"
    MetricsLog(path).append(1, {"x": value})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    back = read_metrics(path)[0]
    assert back.keys() == {"step", "x"}
    assert (
        math.isnan(back["x"])
        if math.isnan(value)
        else (back["x"] == value and math.copysign(1, back["x"]) == math.copysign(1, value))
    )


def test_a_step_cannot_come_twice_or_late(path: Path) -> None:
    log = MetricsLog(path)
    log.append(3, {})
    for step in (3, 2):
        with pytest.raises(ValueError, match=f"step {step} comes after step 3"):
            log.append(step, {})
    assert steps(path) == [3]


def test_only_scalars(path: Path) -> None:
    with pytest.raises(TypeError, match="metric 'x' of step 1 is a list"):
        MetricsLog(path).append(1, {"x": [1]})
    with pytest.raises(ValueError, match="'step'"):
        MetricsLog(path).append(1, {"step": 1})
    assert not path.exists()


def test_every_cut_of_the_last_line_is_survived(path: Path) -> None:
    log = MetricsLog(path)
    log.append(1, {"x": 1.0})
    whole = path.read_bytes()
    log.append(2, {"x": 2.0})
    content = path.read_bytes()
    for length in range(len(whole), len(content)):
        path.write_bytes(content[:length])
        assert steps(path) == [1]
        again = MetricsLog(path)
        assert again.last_step == 1
        again.append(2, {"x": 2.0})
        assert path.read_bytes() == content


def test_rewind_and_repeat(path: Path) -> None:
    log = MetricsLog(path)
    for step in range(6):
        log.append(step, {"x": step / 7})
    before = path.read_bytes()
    assert log.rewind(3) == [4, 5]
    assert steps(path) == [0, 1, 2, 3] and log.last_step == 3
    for step in (4, 5):
        log.append(step, {"x": step / 7})
    assert path.read_bytes() == before
    assert log.rewind(-1) == [0, 1, 2, 3, 4, 5] and path.read_bytes() == b"" and log.last_step == -1


def test_resume_supplies_the_line_that_was_not_written(path: Path) -> None:
    log = MetricsLog(path)
    log.append(1, {"x": 1.0})
    assert log.resume(2, {"x": 2.0}) == [] and steps(path) == [1, 2]
    assert log.resume(2, {"x": 99.0}) == [] and read_metrics(path)[1]["x"] == 2.0
    assert log.resume(1) == [2] and steps(path) == [1]


def test_a_damaged_line_is_skipped_and_named(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_bytes(b'{"step": 1}\n{"step": \n[2]\n{"step": 3}\n')
    with caplog.at_level(logging.WARNING):
        assert steps(path) == [1, 3]
    assert "line 2" in caplog.text and "line 3" in caplog.text


def test_a_line_that_cannot_be_written_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(1, {"a": 1.0})
    os.symlink("/dev/full", tmp_path / "full.jsonl")
    full = MetricsLog(tmp_path / "none.jsonl")
    full.path = tmp_path / "full.jsonl"
    with pytest.raises(RunFolderError, match=r"metrics of step 2 to .*full.jsonl: No space left on device; free space"):
        full.append(2, {"a": 1.0})
