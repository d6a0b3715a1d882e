"""Named phases add up, also across threads and exceptions."""

from __future__ import annotations

import threading

import pytest

from rlhub.utils import timing
from rlhub.utils.timing import PhaseTimer


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def test_measures_adds_and_starts_anew(clock: Clock) -> None:
    timer = PhaseTimer()
    with timer.measure("sleep"):
        clock.now += 2
    with pytest.raises(KeyError), timer.measure("sleep"):
        clock.now += 3
        raise KeyError
    timer.add("other", 1.5)
    assert timer.so_far() == timer.so_far() == {"timing_s/sleep": 5.0, "timing_s/other": 1.5}
    found = timer.drain()
    assert list(found.items()) == [("timing_s/sleep", 5.0), ("timing_s/other", 1.5)]
    assert timer.drain() == timer.so_far() == {}


def test_phases_are_disjoint(clock: Clock) -> None:
    timer = PhaseTimer()
    with timer.measure("outer"):
        clock.now += 3
        with timer.measure("inner"):
            clock.now += 20
            timer.add("call", 7.0)
        clock.now += 100
    assert timer.drain() == {"timing_s/call": 7.0, "timing_s/inner": 13.0, "timing_s/outer": 103.0}


def test_a_call_longer_than_its_block_leaves_no_negative_time() -> None:
    """A future that was sent before the block and read inside it."""
    timer = PhaseTimer()
    with timer.measure("block"):
        timer.add("call", 100.0)
    assert timer.drain() == {"timing_s/call": 100.0, "timing_s/block": 0.0}


def test_threads_lose_nothing() -> None:
    timer = PhaseTimer()

    def work() -> None:
        for _ in range(2000):
            timer.add("x", 1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timer.drain() == {"timing_s/x": 8000.0}
