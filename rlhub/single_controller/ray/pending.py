"""Pending calls of Ray actors, which wait with a deadline, fail fast, and raise typed errors."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    OwnerDiedError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from rlhub.errors import DeadlineError, WorkerDiedError, WorkerError
from rlhub.protocol import DataProto, DataProtoFuture
from rlhub.single_controller.calls import GRACE_S, Deadline, PendingCall, Watch, WorkerInfo, cause_of, grace_is_over, lives
from rlhub.single_controller.invoke import RemoteError
from rlhub.single_controller.ray.nodes import own_address
from rlhub.single_controller.ray.watch import check_cluster, loss

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 60.0
_CLUSTER_EVERY_S = 1.0
_LOOK_EVERY_S = 0.1
_DEATHS = (RayActorError, WorkerCrashedError, NodeDiedError, OwnerDiedError, ObjectLostError, OutOfMemoryError)
_LOG_TAIL_BYTES = 2000


def typed_error(error: BaseException, role: str, worker: WorkerInfo, method: str) -> WorkerError:
    """Returns the rlhub error for what `ray.get` raised for one rank; an rlhub error of the worker's becomes its cause."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RemoteError):
        cause.error.__cause__ = cause.cause
        return cause.error
    where: dict[str, Any] = {"role": role, "rank": worker.rank, "node": worker.node, "remote_type": type(cause).__name__}
    if isinstance(error, _DEATHS) or isinstance(cause, _DEATHS):
        tail = log_tail(worker)
        # Ray appends advice of a general kind to the facts.
        reason = " ".join(str(error).split()).split("Some common causes")[0].strip()
        return WorkerDiedError(f"process {worker.pid} died while or before it ran {method}: {reason}{tail}", **where)
    return WorkerError(f"{method} failed in Ray: {cause}", remote_traceback=str(error), **where)


def log_tail(worker: WorkerInfo) -> str:
    """Returns the end of a worker's log, when it is a file on this machine."""
    if not worker.log or not os.path.isfile(worker.log):
        return f"; log: {worker.log}" if worker.log else ""
    with open(worker.log, "rb") as file:
        file.seek(max(0, os.path.getsize(worker.log) - _LOG_TAIL_BYTES))
        text = file.read().decode(errors="replace").strip()
    return f"; log {worker.log} ends:\n{text}" if text else f"; log {worker.log} is empty"


@dataclass(slots=True, kw_only=True, frozen=True)
class RankOutput:
    """One rank's output batch in the object store, and apart from it its number of rows."""

    role: str
    method: str
    worker: WorkerInfo
    data: Any
    rows: Any


class Gather(PendingCall):
    """A call that was sent to Ray actors: collects one reference per rank.  Results and failures stay, so that waiting again
    gives the same.

    on_failure: called when a rank died, is late or did not answer while another failed, so that it may hang for ever.
    parts: by rank, for calls whose outputs are read as a DataProtoFuture.
    """

    def __init__(
        self,
        role: str,
        method: str,
        references: Mapping[int, Any],
        workers: Mapping[int, WorkerInfo],
        deadline: Deadline,
        on_failure: Callable[[], None],
        parts: Mapping[int, RankOutput] | None = None,
    ) -> None:
        self.name = f"{role}.{method}"
        self._role, self._method = role, method
        self._open: dict[Any, int] = {reference: rank for rank, reference in references.items()}
        self._workers = workers
        self._deadline = deadline
        self._parts = parts or {}
        self._sent = time.monotonic()
        self._next_log = self._sent + _LOG_EVERY_S - 1
        self._outputs: dict[int, Any] = {}
        self._errors: list[WorkerError] = []
        self._late: DeadlineError | None = None
        self._grace_ends = float("inf")
        self._on_failure = on_failure

    @property
    def failed(self) -> bool:
        return bool(self._errors) or self._late is not None

    def done(self) -> bool:
        if self._open and not self.failed:
            self._take_ready(0.0, len(self._open))
        return self.failed or not self._open or self._seconds_left() <= 0 or loss() is not None

    def wait(self) -> dict[int, Any]:
        """Waits as PendingCall says; raises ClusterLostError, too."""
        if self._late is not None:
            raise self._late
        while self._open and not grace_is_over(self._grace_ends, self.has_lost):
            grace = max(self._grace_ends - time.monotonic(), _LOOK_EVERY_S)
            self._check_cluster()
            self._take_ready(min(self._seconds_left(), grace, _CLUSTER_EVERY_S))
            if self._open and not self._errors and self._seconds_left() <= 0:
                self._late = self._pass_deadline()
                self._on_failure()
                raise self._late
        if self._errors:
            worst = self._worst_error()
            if self._open or isinstance(worst, WorkerDiedError):
                self._on_failure()
            raise worst
        return self._outputs

    def has_lost(self) -> bool:
        """Returns what PendingCall says of the workers on this machine: process numbers of others mean nothing here."""
        here = own_address()
        late = [worker for rank in self._late_ranks() if (worker := self._workers[rank]).node == here]
        return any(os.path.isfile(worker.log) and not lives(worker.pid) for worker in late)

    def data_future(self, ranks: Sequence[int], watch: Watch) -> DataProtoFuture:
        reader = PartReader(self._deadline, time.time() + self._seconds_left(), self, watch)
        return DataProtoFuture([self._parts[rank] for rank in ranks], reader.resolve, reader.measure)

    def _check_cluster(self) -> None:
        if loss() is not None:
            self._on_failure()
        check_cluster()

    def _seconds_left(self) -> float:
        return self._sent + self._deadline.seconds - time.monotonic()

    def _take_ready(self, timeout: float, num_wanted: int = 1) -> None:
        """Waits for so many ranks, and keeps what those that are done returned or raised."""
        ready, _ = ray.wait(list(self._open), num_returns=num_wanted, timeout=max(timeout, 0.0))
        if not ready and time.monotonic() >= self._next_log:
            self._next_log += _LOG_EVERY_S
            logger.info("waiting for %s, ranks %s, for %.0f s", self.name, self._late_ranks(), time.monotonic() - self._sent)
        for reference in ready:
            rank = self._open.pop(reference)
            try:
                self._outputs[rank] = ray.get(reference)
            except RayError as error:
                self._errors.append(typed_error(error, self._role, self._workers[rank], self._method))
                self._grace_ends = min(self._grace_ends, time.monotonic() + GRACE_S)

    def _late_ranks(self) -> list[int]:
        return sorted(self._open.values())

    def _pass_deadline(self) -> DeadlineError:
        """Returns the error, after asking late workers on this machine for their stacks."""
        late = [self._workers[rank] for rank in self._late_ranks()]
        logs = [worker.log for worker in late if worker.log and os.path.isfile(worker.log)]
        for worker in late:
            if worker.log in logs:
                _ask_for_stacks(worker.pid)
        where = ", ".join(f"rank {worker.rank} on {worker.node} (process {worker.pid})" for worker in late)
        hint = f"still running: {where}" + (f"; their stacks are in {', '.join(logs)}" if logs else "")
        return self._deadline.error(self.name, hint)

    def _worst_error(self) -> Exception:
        """Returns the failure to raise: a death explains its peers' failures; otherwise the first failure is the cause."""
        worst = cause_of(self._errors)
        for error in self._errors:
            if error is not worst:
                logger.warning("%s also failed: %s", self.name, str(error).splitlines()[0])
        return worst


def _ask_for_stacks(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGUSR1)
    except ProcessLookupError:
        logger.info("process %d is gone", pid)


class PartReader:
    """Reads parts for a DataProtoFuture.  On the driver it first waits for all ranks of the call, as a blocking call does; in
    a worker, to which it was sent within an argument, it reads the parts alone.  ends: the deadline as wall-clock time."""

    def __init__(self, deadline: Deadline, ends: float, gather: Gather | None = None, watch: Watch | None = None) -> None:
        self._deadline = deadline
        self._ends = ends
        self._gather = gather
        self._watch = watch

    def __reduce__(self) -> tuple[Any, ...]:
        return PartReader, (self._deadline, self._ends)

    def resolve(self, parts: list[RankOutput]) -> list[DataProto]:
        """Returns the batches, in order."""
        batches: list[DataProto] = self._read(parts, [part.data for part in parts])
        if self._watch is not None:
            self._watch.receive(batches)
        return batches

    def measure(self, parts: list[RankOutput]) -> list[int]:
        """Returns the rows of each, without fetching the batches."""
        return self._read(parts, [part.rows for part in parts])

    def _read(self, parts: Sequence[RankOutput], references: list[Any]) -> list[Any]:
        try:
            if self._gather is not None:
                self._gather.wait()
            values = [self._get(part, reference) for part, reference in zip(parts, references, strict=True)]
        except BaseException as error:
            if self._watch is not None:
                self._watch.end(error)
            raise
        if self._watch is not None:
            self._watch.end()
        return values

    def _get(self, part: RankOutput, reference: Any) -> Any:
        timeout = max(1.0, self._ends - time.time())
        ends = time.monotonic() + timeout
        try:
            while not ray.wait([reference], timeout=min(_CLUSTER_EVERY_S, ends - time.monotonic()))[0]:
                check_cluster()
                if ends - time.monotonic() <= 0.0:
                    where = f"rank {part.worker.rank} on {part.worker.node}"
                    raise self._deadline.error(f"{part.role}.{part.method}", where)
            return ray.get(reference)
        except RayError as error:
            raise typed_error(error, part.role, part.worker, part.method) from None
