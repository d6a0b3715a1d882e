"""A limit of CPU time."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress

import pytest

from rlhub.rewards.cpu_limit import OutOfCpuTime, cpu_limit


def work(seconds: float) -> None:
    """So much CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_endless_work_is_interrupted_even_where_errors_are_caught() -> None:
    before = signal.getsignal(signal.SIGPROF)
    with pytest.raises(OutOfCpuTime), cpu_limit(0.02):
        while True:
            with suppress(Exception):  # as libraries do
                work(0.001)
    assert signal.getsignal(signal.SIGPROF) == before


def test_time_in_which_others_have_the_core_does_not_count() -> None:
    with cpu_limit(0.2):
        time.sleep(0.3)


def test_afterwards_there_is_no_limit() -> None:
    with cpu_limit(0.2):
        pass
    work(0.3)


def test_another_timer_is_left_alone() -> None:
    """That of a child which ends itself when nobody does."""
    signal.setitimer(signal.ITIMER_REAL, 3600)
    try:
        with cpu_limit(1.0):
            pass
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_other_threads_have_none() -> None:
    ended: list[bool] = []

    def run() -> None:
        with cpu_limit(0.01):
            work(0.03)
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended
