"""How an asynchronous task ended: one type for each way, so that nothing ends as None or gets lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True, frozen=True)
class Accepted:
    """The task returned `value`."""

    task_id: str
    value: Any


@dataclass(slots=True, kw_only=True, frozen=True)
class Rejected:
    """The task decided that its result must not be used: it returned None or raised `Reject`."""

    task_id: str
    reason: str


@dataclass(slots=True, kw_only=True, frozen=True)
class Failed:
    """The task raised `error`."""

    task_id: str
    error: BaseException


@dataclass(slots=True, kw_only=True, frozen=True)
class Cancelled:
    """The task was cancelled before its end."""

    task_id: str


@dataclass(slots=True, kw_only=True, frozen=True)
class TimedOut:
    """The task was cancelled because its deadline, `deadline_s` seconds after its start, had passed."""

    task_id: str
    deadline_s: float


Outcome = Accepted | Rejected | Failed | Cancelled | TimedOut


class Reject(Exception):  # noqa: N818  a signal, not an error
    """Raised in a task to end it as Rejected with this reason."""
