"""When a failed run may start its workers again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rlhub.errors import DeadlineError, WorkerDiedError


@dataclass(slots=True, kw_only=True)
class RestartPolicy:
    """Allow at most `max_restarts` within `window_s` seconds, waiting `backoff_s`, doubled each time up to `max_backoff_s`.

    Only failures of processes count as curable (a death, a passed deadline); a worker that raised would raise again.
    """

    max_restarts: int = 0
    window_s: float = 3600.0
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    clock: Callable[[], float] = time.monotonic
    _times: list[float] = field(default_factory=list)

    def delay(self, error: BaseException) -> float | None:
        """Seconds to wait before starting again after `error`, or None when the run should end.  Counts as a restart."""
        now = self.clock()
        self._times = [moment for moment in self._times if now - moment < self.window_s]
        if not isinstance(error, WorkerDiedError | DeadlineError) or len(self._times) >= self.max_restarts:
            return None
        seconds = min(self.backoff_s * 2.0 ** len(self._times), self.max_backoff_s)
        self._times.append(now)
        return seconds
