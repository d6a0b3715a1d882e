"""From finished groups to training: who waits, what is fresh enough, what was taken, and when too much came to nothing.

The guarantee of the bound is here.  A group is looked at when it is finished and whenever training goes on by a step; one with
tokens beyond the bound is dropped (its place is given back), has these masked, or stays as it is for the correction.

What is broken (a workflow, a reward, an engine that never gets the new weights) breaks every group: without a limit on failures
the run would generate for ever and train nothing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from rlhub.errors import WorkflowError
from rlhub.rollout_service.executor.episode_groups import Group, mask_older
from rlhub.rollout_service.executor.ledger import PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.rollout_service.executor.statistics import RolloutStatistics

logger = logging.getLogger(__name__)


class FailureLimit:
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


StalePolicy = Literal["drop", "mask", "correct"]


@dataclass(slots=True, eq=False)
class GroupRequest:
    """Training waits for so many groups, to be trained at `step` (None: the one after the present version)."""

    count: int
    step: int | None
    answer: Future[list[Group]] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class Delivery:
    """One thread at a time.  Groups that come here are accepted; here they are trained or dropped."""

    def __init__(
        self, staleness: StalenessManager, ledger: PromptLedger, statistics: RolloutStatistics, policy: StalePolicy
    ) -> None:
        self.staleness, self.ledger, self.statistics, self.policy = staleness, ledger, statistics, policy
        self._waiting: list[tuple[int, Group]] = []  # with the version of each one's first token
        self._taken: dict[int, tuple[int, Group]] = {}
        self._requests: deque[GroupRequest] = deque()
        self._step = 0
        self.dropped_in_a_row = 0

    @property
    def num_ready(self) -> int:
        """Groups that wait for training."""
        return len(self._waiting)

    def add(self, group: Group) -> None:
        """A group is finished."""
        first_version = group.first_version
        if self._fresh(first_version, group):
            self._waiting.append((first_version, group))

    def ask(self, request: GroupRequest) -> None:
        self._requests.append(request)

    def withdraw(self, request: GroupRequest) -> bool:
        """Whether the request was still waiting."""
        waiting = request in self._requests
        if waiting:
            self._requests.remove(request)
            self.statistics.wait_s += time.monotonic() - request.since
        return waiting

    def serve(self, *, ended: bool) -> None:
        """Answer who can be answered; `ended`: no more groups will come, so fewer have to do."""
        while self._requests:
            request = self._requests[0]
            step = self.staleness.version + 1 if request.step is None else request.step
            self.age(step)
            if len(self._waiting) < request.count and not ended:
                return
            self._requests.popleft()
            self.statistics.wait_s += time.monotonic() - request.since
            request.answer.set_result(self._take(request.count, step))

    def fail(self, error: BaseException) -> None:
        """Whoever waits gets the error."""
        while self._requests:
            self._requests.popleft().answer.set_exception(error)

    def age(self, step: int) -> None:
        """Apply the bound as of this step to what waits."""
        if step > self._step:
            self._step = step
            self._waiting = [(version, group) for version, group in self._waiting if self._fresh(version, group)]

    def trained(self, step: int) -> None:
        """What was taken for this step, or before, is trained."""
        trained = [ordinal for ordinal, (taken_for, _) in self._taken.items() if taken_for <= step]
        for ordinal in trained:
            del self._taken[ordinal]
        self.ledger.train(*trained)

    def untrained(self) -> list[Group]:
        """Ready or taken for a step that is not over, in order."""
        groups = [*(group for _, group in self._waiting), *(group for _, group in self._taken.values())]
        return sorted(groups, key=lambda group: group.ordinal)

    def _fresh(self, first_version: int, group: Group) -> bool:
        """Whether the group may train at the present step, by the policy for what is older than the bound."""
        if self.policy == "correct" or not self.staleness.is_stale(first_version, self._step):
            return True
        if self.policy == "mask":
            self.statistics.masked_tokens += mask_older(group, self._step - 1 - self.staleness.max_staleness)
            if group.num_tokens:
                return True
        self._drop(group)
        return False

    def _drop(self, group: Group) -> None:
        self.ledger.drop(group.ordinal, f"too old at step {self._step}")
        self.staleness.on_drop()
        self.statistics.drop(group)
        self.dropped_in_a_row += 1

    def _take(self, count: int, step: int) -> list[Group]:
        self._waiting.sort(key=lambda waiting: waiting[1].ordinal)
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self.dropped_in_a_row = 0
        for first_version, group in taken:
            self._taken[group.ordinal] = (step, group)
            beyond = self.staleness.is_stale(first_version, step)  # that of a masked one is from before
            self.statistics.take(group, step, beyond=beyond)
        return [group for _, group in taken]
