"""metrics.jsonl holds each step once, whatever was killed in between; the console on a terminal and in a file."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhub.errors import RunFolderError
from rlhub.tracking import metrics_log
from rlhub.tracking.metrics_log import ConsoleTracker, MetricsLog, read_metrics, troubles
from rlhub.tracking.tracker import GenerationRow, RunInfo


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


RUN = RunInfo(project="rlhub", experiment="[bold]x", folder=Path("out"), total_steps=3)


def play(*, terminal: bool) -> str:
    stream = io.StringIO()
    tracker = ConsoleTracker(stream, terminal=terminal)
    tracker.start(RUN)
    tracker.phase("generate_sequences")
    deadline = time.monotonic() + 60
    while terminal and "generate_sequences" not in stream.getvalue():  # the bar is redrawn by a thread
        assert time.monotonic() < deadline, "the bar is not redrawn"
        time.sleep(0.005)
    tracker.log_generations(0, "val", [GenerationRow(prompt="1+1=", response="[red]2\x1b[2J\n", score=1.0)])
    tracker.log(0, {"val/pass@1": 0.25})
    tracker.log(1, {"reward/mean": 0.5, "critic/score/mean": 9.0, "actor/skipped_steps": 1, "other": 3.0})
    tracker.finish("failed", "reason")
    return stream.getvalue()


def test_plain_lines_without_a_terminal() -> None:
    text = play(terminal=False)
    assert "\x1b" not in text and "\r" not in text
    assert text.splitlines() == [
        "rlhub/[bold]x: out",
        "  val sample (score 1): 1+1= -> [red]2 [2J",
        "step 0/3 | val pass@1 0.250",
        "step 1/3 | reward 0.500",
        "  attention: actor/skipped_steps 1",
        "failed: reason",
    ]


def test_table_and_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_log, "REFRESH_PER_SECOND", 100)
    raw = play(terminal=True)
    assert "\x1b[2J" not in raw  # what a model wrote does not steer the terminal
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw)
    assert re.search(r"step +val pass@1\n +0 +0.250", text)
    assert re.search(r"step +val pass@1 +reward\n +1 +0.500", text)
    assert "[bold]x" in text and "generate_sequences" in text and "attention: actor/skipped_steps 1" in text


def test_troubles_are_counters_of_failures_only() -> None:
    assert troubles({"reward/num_failed": 2.0, "actor/skipped_steps": 0, "reward/num_failed/timeout": 2, "val/pass@1": 1.0}) == (
        "reward/num_failed 2, reward/num_failed/timeout 2"
    )
