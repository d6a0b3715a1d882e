"""Recorder: files first, trackers second, a failing tracker dropped, a resumed run continued."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhub.errors import ConfigError, RlhubError
from rlhub.single_controller.calls import ObservedCall
from rlhub.tracking import recorder as recorder_module
from rlhub.tracking import spans
from rlhub.tracking.metrics_log import read_metrics
from rlhub.tracking.recorder import TRACKERS, Recorder
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.spans import CallTiming
from rlhub.tracking.tracker import GenerationRow, Metrics, RunInfo, Status, Tracker
from rlhub.utils.timing import PhaseTimer

EVENTS: list[tuple[str, object]] = []


@TRACKERS.register("test_listener")
class Listener(Tracker):
    def start(self, run: RunInfo) -> None:
        EVENTS.append(("start", run.config))

    def log(self, step: int, metrics: Metrics) -> None:
        EVENTS.append(("log", step))

    def phase(self, name: str) -> None:
        EVENTS.append(("phase", name))

    def finish(self, status: Status, message: str = "") -> None:
        EVENTS.append(("finish", status))


@TRACKERS.register("test_failing")
class Failing(Listener):
    def log(self, step: int, metrics: Metrics) -> None:
        raise RlhubError("server gone")

    def finish(self, status: Status, message: str = "") -> None:
        raise AssertionError("dropped trackers are not finished")


@TRACKERS.register("test_refusing")
class Refusing(Listener):
    def start(self, run: RunInfo) -> None:
        raise ConfigError("not logged in")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    EVENTS.clear()
    with RunFolder(tmp_path / "run") as folder:
        yield folder


def make(folder: RunFolder, *trackers: str, resumed: int | None = None) -> Recorder:
    config = {"seed": 1, "hf_token": "hunter2"}
    info = RunInfo(project="p", experiment="e", folder=folder.path, config=config, total_steps=4, resumed_step=resumed)
    return Recorder(folder, info, trackers)


def steps(folder: RunFolder) -> list[int]:
    return [row["step"] for row in read_metrics(folder.metrics)]


def test_a_whole_run(folder: RunFolder) -> None:
    recorder = make(folder, "test_listener", "test_listener")
    recorder.start()
    recorder.phase("reward")
    recorder.log_generations(0, "val", [GenerationRow(prompt="two and two", response="four")])
    recorder.log(0, {"val/pass@1": 0.5})
    recorder.finish("finished")
    assert EVENTS == [
        ("start", {"seed": 1, "hf_token": "<redacted>"}), ("phase", "reward"), ("log", 0), ("finish", "finished"),
    ]  # fmt: skip
    assert steps(folder) == [0] and "two and two" in folder.report.read_text() and "hunter2" not in folder.config.read_text()


def test_a_failing_tracker_is_dropped_and_the_files_go_on(folder: RunFolder, caplog: pytest.LogCaptureFixture) -> None:
    recorder = make(folder, "test_failing", "test_listener")
    recorder.start()
    with caplog.at_level(logging.WARNING):
        recorder.log(1, {"x": 1.0})
        recorder.log(2, {"x": 1.0})
    recorder.finish("finished")
    assert caplog.text.count("test_failing failed") == 1 and "server gone" in caplog.text
    assert steps(folder) == [1, 2] and EVENTS[2:] == [("log", 1), ("log", 2), ("finish", "finished")]


def test_a_tracker_that_cannot_start_stops_the_run_before_it_begins(folder: RunFolder) -> None:
    with pytest.raises(ConfigError, match="not logged in"):
        make(folder, "test_listener", "test_refusing").start()
    assert EVENTS[-1] == ("finish", "failed")


def test_a_tracker_that_never_started_is_not_told_of_the_end_which_would_hide_why(folder: RunFolder) -> None:
    recorder = make(folder, "test_refusing")
    with pytest.raises(ConfigError, match="not logged in"):
        recorder.start()
    recorder.finish("failed", "not logged in")
    assert EVENTS == [] and folder.report.exists()


def test_resume_repeats_no_step_and_loses_none(folder: RunFolder) -> None:
    first = make(folder)
    first.start()
    for step in (1, 2, 3):
        first.log(step, {"x": float(step)})
    second = make(folder, resumed=2)
    assert second.start() == [3]
    second.log(3, {"x": 3.0})
    assert steps(folder) == [1, 2, 3]
    third = make(folder, resumed=4)
    assert third.start({"x": 4.0}) == [] and steps(folder) == [1, 2, 3, 4]
    fresh = make(folder)
    assert fresh.start() == [1, 2, 3, 4] and steps(folder) == []


def test_the_report_is_refreshed_now_and_then(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = make(folder)
    recorder.start()
    recorder.log(1, {"x": 1.0})
    assert not folder.report.exists()
    monkeypatch.setattr(recorder_module.time, "monotonic", lambda: 1e9)
    recorder.log(2, {"x": 1.0})
    written = folder.report.stat().st_mtime_ns
    recorder.log(3, {"x": 1.0})
    assert folder.report.stat().st_mtime_ns == written and "running" in folder.report.read_text()


def test_call_timing_sums_what_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    timer, phases = PhaseTimer(), []
    timing = CallTiming(timer, phases.append)
    for now, seconds, error in ((101.0, 1.0, None), (103.0, 2.0, None), (107.0, 4.0, ValueError())):
        call = ObservedCall(role="actor", method="update_actor", blocking=True, workers=())
        timing.on_start(call)
        monkeypatch.setattr(spans.time, "perf_counter", lambda now=now: now)
        timing.on_end(call, seconds, error)
    assert timer.drain() == {"timing_s/update_actor": 3.0} and phases == ["update_actor"] * 3


def test_calls_that_run_at_the_same_time_add_up_to_the_time_that_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent at 100 and at 101; the first is read at 104, the other at 106."""
    timer = PhaseTimer()
    timing = CallTiming(timer)
    for method, now, seconds in (("compute_log_prob", 104.0, 4.0), ("compute_values", 106.0, 5.0)):
        monkeypatch.setattr(spans.time, "perf_counter", lambda now=now: now)
        timing.on_end(ObservedCall(role="actor", method=method, blocking=False, workers=()), seconds, None)
    assert timer.drain() == {"timing_s/compute_log_prob": 4.0, "timing_s/compute_values": 2.0}
