"""Several calls to different groups, waited for together: the cause of a failure is raised, whoever noticed it first."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from rlhub.errors import DeadlineError, WorkerDiedError, WorkerError
from rlhub.single_controller import calls, wait_all


class Future:
    """Done `after_s` seconds from now; then it returns or raises its result.  asked: in which order results were taken."""

    def __init__(self, result: object, after_s: float = 0.0) -> None:
        self.result, self.since = result, time.monotonic() + after_s

    def done(self) -> bool:
        return time.monotonic() >= self.since

    def get(self) -> object:
        assert self.done(), "wait_all would have blocked on one of them"
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


BROKEN = WorkerError("the connection broke", role="actor", rank=0)
REPORTED = WorkerDiedError("a peer is gone", role="weight receiver", rank=1)
DEAD = WorkerDiedError("process 7 died", role="rollout", rank=0, remote_type="ActorDiedError")


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "GRACE_S", 0.3)


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
    begin = time.monotonic()
    with pytest.raises(WorkerError, match="the connection broke"):
        waited(Future("never", 60.0), Future(BROKEN))
    assert time.monotonic() - begin < 5
