"""The seam through which timing and traces see every worker-group call, without the callers knowing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, kw_only=True, frozen=True)
class WorkerInfo:
    """Where one rank lives.  log: its log file on that node, empty when its output is left to the backend."""

    rank: int
    node: str
    pid: int
    log: str = ""


@dataclass(slots=True, kw_only=True, frozen=True)
class Call:
    """One call of a worker-group method.  workers: the ranks that run it."""

    role: str
    method: str
    blocking: bool
    workers: tuple[WorkerInfo, ...]


class CallObserver(Protocol):
    """Told of every call, in the driver's thread.  An exception raised in `on_start` makes the call fail with it."""

    def on_start(self, call: Call) -> None:
        """Just before the call is sent."""
        ...

    def on_end(self, call: Call, seconds: float, error: BaseException | None) -> None:
        """The results (or the error) have reached the driver; for a non-blocking call, when its future was read here."""
        ...
