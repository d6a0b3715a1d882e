"""What a worker group and its backend say to each other: requests per rank, and calls under way."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhub.errors import WorkerDiedError
from rlhub.protocol import DataProtoFuture
from rlhub.single_controller.observer import Call, CallObserver

GRACE_S = 3.0
"""After a first failure, wait this long for the others': when a rank dies its peers fail too (their collective breaks), often
sooner, and the death is what to report."""
UNTOLD_S = 60.0
"""Wait as much longer for the word of a death that has plainly happened: on a machine that is overloaded it comes late."""

_POLL_S = 0.005


@dataclass(slots=True, kw_only=True)
class RankRequest:
    """One rank's share of a call.  reply: False lets the rank keep its output to itself (nothing crosses back)."""

    rank: int
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    reply: bool = True


@dataclass(slots=True, kw_only=True)
class Request:
    """A call as the backend gets it.

    materialize: fetch DataProtoFuture arguments in the worker before the method runs.
    as_data: the outputs are DataProto and will be asked for with `data_future`.
    deadline_s: longest wait for the results, from the moment of sending; None waits for ever.
    """

    role: str
    method: str
    ranks: list[RankRequest]
    materialize: bool = True
    as_data: bool = False
    deadline_s: float | None = None

    @property
    def name(self) -> str:
        return f"{self.role}.{self.method}"


class PendingCall(ABC):
    """A call that was sent to its ranks."""

    @abstractmethod
    def wait(self) -> dict[int, Any]:
        """Outputs by rank.  Blocks until all ranks are done, one failed (WorkerError, WorkerDiedError) or the deadline
        passed (DeadlineError naming the call and the ranks that are late)."""

    @abstractmethod
    def done(self) -> bool:
        """True when `wait` would not block."""

    @abstractmethod
    def data_future(self, ranks: Sequence[int], watch: Watch) -> DataProtoFuture:
        """The outputs of `ranks` as one future batch in that order; reading it here ends `watch`.  Needs `Request.as_data`."""

    def has_lost(self) -> bool:
        """Whether a rank that has not answered is seen to be dead, though the backend has not said so yet."""
        return False


class Watch:
    """Tells the observers of one call: start at construction, end once."""

    def __init__(self, call: Call, observers: Sequence[CallObserver]) -> None:
        self._call = call
        self._observers = tuple(observers)
        self._start = time.perf_counter()
        self._ended = False
        for observer in self._observers:
            observer.on_start(call)

    def end(self, error: BaseException | None = None) -> None:
        if self._ended:
            return
        self._ended = True
        seconds = time.perf_counter() - self._start
        for observer in self._observers:
            observer.on_end(self._call, seconds, error)


class CallFuture:
    """Result of a non-blocking call that is not one DataProto.  `get()` waits and returns what a blocking call would."""

    def __init__(self, pending: PendingCall, finish: Callable[[dict[int, Any]], Any], watch: Watch) -> None:
        self._pending = pending
        self._finish = finish
        self._watch = watch

    def done(self) -> bool:
        return self._pending.done()

    def has_lost(self) -> bool:
        """See PendingCall."""
        return self._pending.has_lost()

    def as_data(self, ranks: Sequence[int]) -> DataProtoFuture:
        """The same result as a batch that can be split and passed on without waiting."""
        return self._pending.data_future(ranks, self._watch)

    def get(self) -> Any:
        """Wait for the result; raises the worker's error or a DeadlineError.  May be called again."""
        try:
            result = self._finish(self._pending.wait())
        except BaseException as error:
            self._watch.end(error)
            raise
        self._watch.end()
        return result


def grace_is_over(ends: float, has_lost: Callable[[], bool]) -> bool:
    """Whether to wait no longer for what explains a failure.  ends: of the grace; asked only after it: `has_lost`."""
    now = time.monotonic()
    return now >= ends and (now >= ends + UNTOLD_S or not has_lost())


def cause_of(errors: Sequence[Exception]) -> Exception:
    """The failure that explains the others: a death that the backend saw, a death that a peer reports, else the first."""

    def weight(error: Exception) -> int:
        return 1 + bool(error.remote_type) if isinstance(error, WorkerDiedError) else 0

    return max(errors, key=weight)


def wait_all(futures: Iterable[CallFuture]) -> list[Any]:
    """The results of calls that were sent to different groups, in order.

    Raises as soon as one fails, after a moment for the others to fail as well: a death explains what it did to other groups
    that wait for the dead rank, whichever call noticed first.
    """
    waiting = dict(enumerate(futures))
    results: dict[int, Any] = {}
    errors: list[Exception] = []
    grace_ends = float("inf")
    over = False
    while waiting and not over:
        over = grace_is_over(grace_ends, lambda: any(future.has_lost() for future in waiting.values()))  # then one last look
        done = [index for index, future in waiting.items() if future.done()]
        for index in done:
            try:
                results[index] = waiting.pop(index).get()
            except Exception as error:  # noqa: BLE001  # raised below, when it is known which of them is the cause
                errors.append(error)
                grace_ends = min(grace_ends, time.monotonic() + GRACE_S)
        if not done and not over:
            time.sleep(_POLL_S)
    if errors:
        raise cause_of(errors)
    return [results[index] for index in sorted(results)]
