"""Several calls to different groups, waited for together: the cause of a failure is raised, whoever noticed it first."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlhub.errors import DeadlineError, WorkerDiedError, WorkerError
from rlhub.single_controller import calls, wait_all


class Clock:
    """Time passes while somebody sleeps.  nap_s: how long a sleep lasts at least."""

    def __init__(self) -> None:
        self.now = self.nap_s = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, self.nap_s)


CLOCK = Clock()


class Future:
    """Done `after_s` seconds from now; then it returns or raises its result.  lost: until then its rank is seen to be dead."""

    def __init__(self, result: object, after_s: float = 0.0, *, lost: bool = False) -> None:
        self.result, self.since, self.lost = result, CLOCK.now + after_s, lost

    def done(self) -> bool:
        return CLOCK.now >= self.since

    def has_lost(self) -> bool:
        return self.lost

    def get(self) -> object:
        assert self.done(), "wait_all would have blocked on one of them"
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


BROKEN = WorkerError("the connection broke", role="actor", rank=0)
REPORTED = WorkerDiedError("a peer is gone", role="weight receiver", rank=1)
DEAD = WorkerDiedError("process 7 died", role="rollout", rank=0, remote_type="ActorDiedError")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLOCK, "nap_s", 0.0)
    monkeypatch.setattr(calls, "time", CLOCK)


def waited(*futures: Future) -> list[object]:
    return wait_all(futures)  # type: ignore[arg-type]


def test_results_in_the_order_of_the_calls() -> None:
    assert waited(Future("slow", 0.05), Future("fast"), Future(None, 0.02)) == ["slow", "fast", None]
    assert waited() == []


@pytest.mark.parametrize(
    "futures",
    [
        lambda: [Future(BROKEN), Future(DEAD, 0.1)],
        lambda: [Future(DEAD), Future(BROKEN)],
        lambda: [Future(REPORTED), Future(DEAD, 0.1)],
        lambda: [Future(DEAD, 0.1), Future(REPORTED), Future(BROKEN)],
    ],
)
def test_a_death_explains_the_others(futures: Callable[[], list[Future]]) -> None:
    with pytest.raises(WorkerDiedError, match="process 7 died"):
        waited(*futures())


def test_a_report_of_a_death_comes_before_other_failures_and_the_first_before_later_ones() -> None:
    with pytest.raises(WorkerDiedError, match="a peer is gone"):
        waited(Future(BROKEN), Future(REPORTED))
    with pytest.raises(DeadlineError, match="first"):
        waited(Future(BROKEN, 0.1), Future(DeadlineError("first", 1.0)))


def test_a_call_that_hangs_does_not_hide_the_failure() -> None:
    begin = CLOCK.now
    with pytest.raises(WorkerError, match="the connection broke"):
        waited(Future("never", 60.0), Future(BROKEN))
    assert CLOCK.now - begin < 5


@pytest.mark.parametrize(("dies_after_s", "told"), [(1.0, DEAD), (99.0, BROKEN)])
def test_a_driver_that_was_held_up_sees_what_failed_meanwhile(dies_after_s: float, told: Exception) -> None:
    """It has no core from the first failure until long after the time that it gives to the others."""
    CLOCK.nap_s = 50.0
    with pytest.raises(WorkerError) as caught:
        waited(Future(BROKEN), Future(DEAD, dies_after_s))
    assert caught.value is told


def test_the_word_of_a_death_that_is_seen_is_waited_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nobody seen dead, and after the longest wait, the failure itself is raised."""
    monkeypatch.setattr(calls, "GRACE_S", 0.0)
    with pytest.raises(WorkerDiedError, match="process 7 died"):
        waited(Future(BROKEN), Future(DEAD, 0.1, lost=True))
    with pytest.raises(WorkerError, match="the connection broke"):
        waited(Future(BROKEN), Future(DEAD, 60.0))
    monkeypatch.setattr(calls, "UNREPORTED_S", 0.05)
    with pytest.raises(WorkerError, match="the connection broke"):
        waited(Future(BROKEN), Future(DEAD, 60.0, lost=True))
