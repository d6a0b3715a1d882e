"""How long groups of episodes may come to nothing before the run is stopped, and when its user is told before that.

What is broken (a workflow, a reward, an engine that never gets the new weights) breaks every group: without an end the run
would generate for ever and train nothing.
"""

from __future__ import annotations

import logging

from rlhub.errors import WorkflowError
from rlhub.rollout_service.executor.staleness import StalenessManager

logger = logging.getLogger(__name__)


class Patience:
    """limit: so many groups in a row may fail, or be too old when they come.  Rejected ones are told of, and never too many."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._failed_in_a_row = self._num_failed = self._fruitless = 0

    def complete(self) -> None:
        """All episodes of a group have ended well."""
        self._failed_in_a_row = 0

    def accepted(self) -> None:
        """A group may be trained."""
        self._fruitless = 0

    def failed(self, ordinal: int, error: BaseException) -> WorkflowError | None:
        """The group of this prompt failed; what stops the run, if this is one too many."""
        self._failed_in_a_row += 1
        number = self._failed_in_a_row
        if number >= self.limit:
            message = f"{number} groups of episodes failed in a row, the last with {type(error).__name__}: {error}"
            stop = WorkflowError(f"{message}. Correct the workflow, or raise actor_rollout_ref.rollout.agent.max_failed_batches")
            stop.__cause__ = error
            return stop
        self._num_failed += 1
        if _rare(self._num_failed):
            logger.warning("%d groups of episodes failed, the last of prompt %d", self._num_failed, ordinal, exc_info=error)
        return None

    def rejected(self, reason: str) -> None:
        """A group gives nothing to train, for whatever reason."""
        self._fruitless += 1
        times, rest = divmod(self._fruitless, self.limit)
        if rest == 0 and _rare(times):
            logger.warning("%d groups in a row were rejected, the last for: %s", self._fruitless, reason)

    def dropped(self, in_a_row: int, staleness: StalenessManager) -> WorkflowError | None:
        """So many groups were too old, one after the other; what stops the run, if too many: it is no matter of time."""
        if in_a_row < self.limit:
            return None
        return WorkflowError(
            f"{in_a_row} groups in a row were more than {staleness.max_staleness} versions old when they came, at version "
            f"{staleness.version}: the engine that generates does not get the new weights, or episodes take longer than so many "
            "training steps; then raise trainer.max_staleness, or set trainer.stale_policy=correct"
        )


def _rare(count: int) -> bool:
    """The 1st, 2nd, 4th, 8th, ...: no flood."""
    return count.bit_count() == 1
