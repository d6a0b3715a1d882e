"""The Gantt of the last steps: what is in it, where it lies, and that nobody's text becomes markup."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlhub.tracking.metrics_log import MetricsLog
from rlhub.tracking.recorder import Recorder
from rlhub.tracking.report import write_report
from rlhub.tracking.report_charts import (
    GANTT_RIGHT,
    GANTT_WIDTH,
    LABEL,
    MAX_BARS,
    MAX_ROWS,
    NUM_STEPS,
    episode_chart,
    gantt,
    last_steps,
    stack,
)
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.spans import STEPS, TRAINER, Span, SpanLog, read_trace, write_trace
from rlhub.tracking.tracker import RunInfo


def span(lane: str, name: str, start: float, end: float) -> Span:
    return Span(lane=lane, name=name, start=start, end=end)


def a_run(num_steps: int) -> list[Span]:
    """Steps of 2 s from second 100 on: 0.5 s of waiting, 1.5 s of updating, a replica that is busy all the time."""
    spans = []
    for step in range(num_steps):
        at = 100.0 + 2 * step
        spans += [span(TRAINER, "wait_for_episodes", at, at + 0.5), span("actor", "update_actor", at + 0.5, at + 2.0)]
        spans += [span("replica 0", "generate", at, at + 2.0), span(STEPS, f"step {step + 1}", at, at + 2.0)]
    return spans


def bars(drawing: str) -> dict[str, tuple[float, float]]:
    """Tip's first line -> (x, width) of the last bar with it."""
    pattern = r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"[^>]*><title>([^<\n]*)'
    return {title: (float(x), float(width)) for x, width, title in re.findall(pattern, drawing)}


def test_the_last_steps_fill_the_width_and_bars_lie_where_their_time_was() -> None:
    drawing = gantt(a_run(8))
    found = bars(drawing)
    assert [title for title in found if title.startswith("step")] == [f"step {n}: 2 s" for n in (6, 7, 8)]
    second = (GANTT_WIDTH - LABEL - GANTT_RIGHT) / (2 * NUM_STEPS)
    assert found["step 8: 2 s"] == pytest.approx((LABEL + 4 * second, 2 * second), abs=0.2)
    assert found["update_actor: 1.5 s"] == pytest.approx((LABEL + 4.5 * second, 1.5 * second), abs=0.2)
    assert [lane for lane in ("steps", "trainer", "actor", "replica 0") if f">{lane}</text>" not in drawing] == []
    assert len(re.findall("<rect", drawing)) == 4 * NUM_STEPS, "nothing of earlier steps"


def test_without_a_whole_step_all_there_is_is_shown_and_of_nothing_nothing() -> None:
    assert gantt([]) == "" and gantt([span("a", "b", 1.0, 1.0)]) == ""
    assert "validate: 3 s" in bars(gantt([span("actor", "validate", 5.0, 8.0)]))


def test_what_overlaps_lies_below_each_other_and_nothing_else_does() -> None:
    one, two, three = span("a", "1", 0.0, 2.0), span("a", "2", 1.0, 3.0), span("a", "3", 2.0, 4.0)
    assert stack([three, one, two]) == [[one, three], [two]]
    many = [span("a", str(n), 0.1 * n, 10.0) for n in range(9)]
    rows = stack(many)
    assert len(rows) == MAX_ROWS and sum(map(len, rows)) == 9


def test_of_too_many_the_longest_are_drawn_and_the_rest_is_counted() -> None:
    short = [span("replica 0", "token", 100 + n / 1e3, 100 + (n + 0.5) / 1e3) for n in range(1000)]
    window = last_steps([*a_run(1), *short])
    assert window is not None and len(window.spans) == MAX_BARS and window.left_out == 1004 - MAX_BARS
    assert {"wait_for_episodes", "update_actor", "generate", "step 1"} <= {one.name for one in window.spans}
    assert f"{window.left_out} short ones are left out" in gantt([*a_run(1), *short])


def test_episodes_begin_at_zero_and_the_longest_comes_first() -> None:
    short = [span("episode 1-0", "queue", 50.0, 51.0), span("episode 1-0", "generate", 51.0, 53.0)]
    long = [span("episode 7-3", "generate", 90.0, 94.0), span("episode 7-3", "tool", 94.0, 96.0)]
    drawing = episode_chart([*short, *long])
    assert drawing.index(">episode 7-3</text>") < drawing.index(">episode 1-0</text>")
    second, found = (GANTT_WIDTH - LABEL - GANTT_RIGHT) / 6, bars(drawing)
    assert found["queue: 1 s"] == pytest.approx((LABEL, second), abs=0.2)
    assert found["tool: 2 s"] == pytest.approx((LABEL + 4 * second, 2 * second), abs=0.2)
    assert episode_chart([]) == episode_chart([span("episode 1-0", "queue", 1.0, 1.0)]) == ""


def test_foreign_text_stays_text() -> None:
    hostile = "</title><script>alert(1)</script>"
    one = Span(lane=hostile, name=hostile, start=0.0, end=1.0, args={hostile: hostile})
    drawing = gantt([one])
    assert "<script" not in drawing and "alert(1)" in drawing


def test_the_report_has_what_the_run_recorded(tmp_path: Path) -> None:
    spans = SpanLog()
    for one in a_run(4):
        spans.record(one.lane, one.name, one.start, one.end)
    spans.episodes.add([span("episode 5-1", "generate", 101.0, 101.25)])
    folder = RunFolder(tmp_path)
    with folder:
        recorder = Recorder(folder, RunInfo(project="p", experiment="e", folder=tmp_path), [], spans)
        recorder.start()
        recorder.log(1, {"reward/mean": 1.0})
        recorder.finish("finished")
    assert read_trace(folder.trace) == spans.latest()
    report = folder.report.read_text()
    assert "Last steps" in report and "update_actor: 1.5 s" in report
    steps, episodes = report.split("Single episodes", 1)
    assert ">episode 5-1</text>" in episodes and "episode 5-1" not in steps and "generate: 0.25 s" in episodes
    (tmp_path / "other").mkdir()
    other = RunFolder(tmp_path / "other")
    with other:
        Recorder(other, RunInfo(project="p", experiment="e", folder=tmp_path), []).finish("finished")
    assert "Last steps" not in other.report.read_text() and not other.trace.exists()


def test_a_killed_runs_report_can_be_remade_with_it(tmp_path: Path) -> None:
    folder, info = RunFolder(tmp_path), RunInfo(project="p", experiment="e", folder=tmp_path)
    write_trace(folder.trace, a_run(2))
    assert "step 2: 2 s" in write_report(folder, info, "failed").read_text()
    folder.trace.write_text(folder.trace.read_text()[:300])
    assert "Last steps" not in write_report(folder, info, "failed").read_text()


def test_staleness_is_drawn_as_shares_of_each_step(tmp_path: Path) -> None:
    folder, info = RunFolder(tmp_path), RunInfo(project="p", experiment="e", folder=tmp_path)
    log = MetricsLog(folder.metrics)
    log.append(1, {"staleness/share_0": 1.0, "staleness/max": 0.0})
    log.append(2, {"staleness/share_0": 0.25, "staleness/share_1": 0.75, "staleness/max": 1.0})
    text = write_report(folder, info, "finished").read_text()
    assert "Share of the samples by versions behind" in text and "1 behind: 0.75 of the samples" in text
    assert "1 behind: 0 " not in text, "a share of nothing has no bar"
    assert text.count("staleness/share_") == 0, "drawn once"
