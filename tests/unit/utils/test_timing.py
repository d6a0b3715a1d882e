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
