"""The console on a terminal and in a file."""

from __future__ import annotations

import io
import re
import time
from pathlib import Path

import pytest

from rlhub.tracking import metrics_log
from rlhub.tracking.metrics_log import ConsoleTracker, troubles
from rlhub.tracking.tracker import GenerationRow, RunInfo

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
