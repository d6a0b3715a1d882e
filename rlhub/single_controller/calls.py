"""The messages between a worker group, its backend and its observers about one call.

A `Request` contains each rank's share of a call and the deadline; a backend turns it into a `PendingCall`; the caller reads that
through a `CallFuture` or a DataProtoFuture; and a `Watch` reports the start and the end to the observers, which is how timing and
traces see every call without the callers knowing.

Observers also learn the sizes of what a call carries out of the driver and into it.  Both backends count the tensors and arrays
of a batch by their sizes, which are the bytes of the out-of-band buffers in which they travel.  Under Ray the objects of a
batch (texts, identifiers, `meta_info`) are pickled once more for their size; in process nothing is serialized, and they count
as their column of pointers.  Futures carry references and count nothing.  Of an AsyncActor under Ray the pickled requests and
results count.
"""

from __future__ import annotations

import pickle
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import psutil
from torch import Tensor

from rlhub.errors import DeadlineError, WorkerDiedError
from rlhub.protocol import BatchRef, DataProto, DataProtoFuture, Retain
from rlhub.protocol.columns import num_bytes
from rlhub.protocol.exchange import ROWS, RankMoves

GRACE_S = 3.0
"""After a first failure, wait this long for the others': when a rank dies its peers fail too (their collective breaks), often
sooner, and the death is what to report."""
UNREPORTED_S = 60.0
"""Wait as much longer for the report of a death that has plainly happened: on a machine that is overloaded it comes late."""

_POLL_S = 0.005


@dataclass(slots=True, kw_only=True, frozen=True)
class WorkerInfo:
    """The place of one rank.  log: its log file on that node, empty when its output is left to the backend."""

    rank: int
    node: str
    pid: int
    log: str = ""


@dataclass(slots=True, kw_only=True, frozen=True)
class ObservedCall:
    """One call of a worker-group method, as observers see it.  workers: the ranks that run it."""

    role: str
    method: str
    blocking: bool
    workers: tuple[WorkerInfo, ...]


class CallObserver(Protocol):
    """Learns of every call, in the thread that makes it or waits for it.  An exception raised in `on_start` makes the call fail
    with it."""

    def on_start(self, call: ObservedCall) -> None:
        """Runs just before the call is sent."""
        ...

    def on_end(self, call: ObservedCall, seconds: float, error: BaseException | None) -> None:
        """Runs when the results (or the error) have reached the driver; for a non-blocking call, when its future is read."""
        ...

    def on_transfer(self, call: ObservedCall, *, sent: int = 0, received: int = 0) -> None:
        """Runs when bytes of arguments are about to leave the driver, and when bytes of results have entered it: zero or more
        times for a call, also after its end, since the parts of a future may be fetched one by one.  From any thread."""
        ...


class Watch:
    """Reports one call to the observers: its start at construction, its end once, and what it carries.

    As a context manager around the sending it ends the call only where that fails.  size_of: the bytes of a value on its way.
    """

    def __init__(self, call: ObservedCall, observers: Sequence[CallObserver], size_of: Callable[[Any], int]) -> None:
        self._call = call
        self._observers = tuple(observers)
        self._size_of = size_of
        self._start = time.perf_counter()
        self._ended = False
        for observer in self._observers:
            observer.on_start(call)

    def end(self, error: BaseException | None = None) -> None:
        """Reports the end; only the first time counts."""
        if self._ended:
            return
        self._ended = True
        seconds = time.perf_counter() - self._start
        for observer in self._observers:
            observer.on_end(self._call, seconds, error)

    def send(self, ranks: Sequence[RankRequest]) -> None:
        """Reports the arguments of a call; a value that is stored once for several ranks counts once."""
        if self._observers:
            values = [value for rank in ranks for value in (*rank.args, *rank.kwargs.values())]
            uses, first = Counter(map(id, values)), {id(value): value for value in values}
            sizes = {key: self._size_of(value) for key, value in first.items()}
            self._transfer(sent=sum(size * (1 if size >= SHARE_BYTES else uses[key]) for key, size in sizes.items()))

    def receive(self, values: Iterable[Any]) -> None:
        """Reports results that the driver has fetched."""
        if self._observers:
            self._transfer(received=sum(map(self._size_of, values)))

    def _transfer(self, **num_bytes: int) -> None:
        for observer in self._observers:
            observer.on_transfer(self._call, **num_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.end(error)


@dataclass(slots=True, kw_only=True, frozen=True)
class Deadline:
    """The longest wait for a call, counted from its sending.  setting: the setting that holds it, for the error."""

    seconds: float
    setting: str = ""

    def error(self, name: str, hint: str) -> DeadlineError:
        """Returns the error of a call that was not done in time."""
        remedy = f"; raise {self.setting} if it needs longer" if self.setting else ""
        return DeadlineError(name, self.seconds, hint + remedy)


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
    as_data: the outputs are DataProto and will be read through `data_future`.
    retain: what of the outputs stays with the ranks.
    rows: the method is one of the processes' RowKeepers, not of the role's worker.
    """

    role: str
    method: str
    ranks: list[RankRequest]
    deadline: Deadline
    materialize: bool = True
    as_data: bool = False
    retain: Retain | None = None
    rows: bool = False

    @property
    def worker(self) -> str:
        """Returns the name by which the process knows the object that runs the method."""
        return ROWS if self.rows else self.role

    @property
    def name(self) -> str:
        return f"{self.role}.{self.method}"


class PendingCall(ABC):
    """A call that was sent to its ranks."""

    @abstractmethod
    def wait(self) -> dict[int, Any]:
        """Returns the outputs by rank.  Blocks until all ranks are done, one failed (WorkerError, WorkerDiedError) or the
        deadline passed (DeadlineError naming the call, the deadline's setting and the ranks that are late)."""

    @abstractmethod
    def done(self) -> bool:
        """Returns whether `wait` would not block."""

    @abstractmethod
    def data_future(self, ranks: Sequence[int], watch: Watch) -> DataProtoFuture:
        """Returns the outputs of `ranks`, in that order, as one batch that can be split and passed on without waiting; reading it
        here ends `watch`.  Needs `Request.as_data`."""

    def has_lost(self) -> bool:
        """Returns whether a rank that has not answered is plainly dead, though the backend has not reported it yet."""
        return False


class CallFuture:
    """The result of a non-blocking call that is not one DataProto.  `get()` waits and returns what a blocking call would."""

    def __init__(self, pending: PendingCall, finish: Callable[[dict[int, Any]], Any], watch: Watch) -> None:
        self._pending = pending
        self._finish = finish
        self._watch = watch
        self._received = False

    def done(self) -> bool:
        """Returns whether `get` would not block."""
        return self._pending.done()

    def has_lost(self) -> bool:
        """See PendingCall."""
        return self._pending.has_lost()

    def get(self) -> Any:
        """Waits for the result; raises the worker's error or a DeadlineError.  May be called again."""
        try:
            outputs = self._pending.wait()
            result = self._finish(outputs)
        except BaseException as error:
            self._watch.end(error)
            raise
        self._watch.end()
        if not self._received:
            self._received = True
            self._watch.receive(outputs.values())
        return result


def grace_is_over(ends: float, has_lost: Callable[[], bool]) -> bool:
    """Returns whether to stop waiting for what explains a failure.  ends: the end of the grace, after which `has_lost` counts."""
    now = time.monotonic()
    return now >= ends and (now >= ends + UNREPORTED_S or not has_lost())


def lives(pid: int) -> bool:
    """Returns whether a process of this machine has not ended; one that its parent has not waited for yet has."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def cause_of(errors: Sequence[Exception]) -> Exception:
    """Returns the failure that explains the others: a death that the backend reports, one that a peer reports, or the first."""

    def weight(error: Exception) -> int:
        return 1 + bool(error.remote_type) if isinstance(error, WorkerDiedError) else 0

    return max(errors, key=weight)


def wait_all(futures: Iterable[CallFuture]) -> list[Any]:
    """Returns the results of calls that were sent to different groups, in order.

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


SHARE_BYTES = 32 * 1024
"""Values at least this large are stored once when several ranks get them; smaller ones cost less inside the call."""


def column_bytes(value: Any) -> int:
    """Returns the bytes of the arrays and strings in a value, down to containers of containers; other objects count nothing."""
    if isinstance(value, DataProto):
        return column_bytes(value.non_tensor_batch) + column_bytes(value.tensors())
    if isinstance(value, BatchRef | RankMoves):
        return value.num_bytes
    if isinstance(value, Tensor):
        return num_bytes(value)
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(column_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(column_bytes, value))
    return 0


def pickled_bytes(value: Any) -> int:
    """Returns the bytes of a value between processes: of a batch the tensors, and its pickled arrays and meta dictionary with
    their out-of-band buffers; of anything else `column_bytes`."""
    if isinstance(value, BatchRef):
        return pickled_bytes(value.small) + column_bytes(value) - column_bytes(value.small)
    if not isinstance(value, DataProto):
        return column_bytes(value)
    buffers: list[pickle.PickleBuffer] = []
    try:
        head = pickle.dumps((value.non_tensor_batch, value.meta_info), protocol=5, buffer_callback=buffers.append)
    except Exception:  # noqa: BLE001 - a user's object may raise anything while it is pickled; the transport then says what
        return column_bytes(value)
    return column_bytes(value.tensors()) + len(head) + sum(buffer.raw().nbytes for buffer in buffers)
