"""Named phases add up, also across threads and exceptions."""

from __future__ import annotations

import threading
import time

import pytest

from rlhub.utils.timing import PhaseTimer


def test_measures_adds_and_starts_anew() -> None:
    timer = PhaseTimer()
    with timer.measure("sleep"):
        time.sleep(0.02)
    with pytest.raises(KeyError), timer.measure("sleep"):
        time.sleep(0.02)
        raise KeyError
    timer.add("other", 1.5)
    found = timer.drain()
    assert list(found) == ["timing_s/sleep", "timing_s/other"]
    assert 0.04 <= found["timing_s/sleep"] < 1.0 and found["timing_s/other"] == 1.5
    assert timer.drain() == {}


def test_phases_are_disjoint() -> None:
    timer = PhaseTimer()
    start = time.perf_counter()
    with timer.measure("outer"):
        time.sleep(0.03)
        with timer.measure("inner"):
            time.sleep(0.02)
            timer.add("call", 0.01)
        time.sleep(0.01)
    whole = time.perf_counter() - start
    found = timer.drain()
    assert sum(found.values()) == pytest.approx(whole, abs=0.005)
    assert found["timing_s/outer"] >= 0.04 and found["timing_s/inner"] >= 0.01 and found["timing_s/call"] == 0.01


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
