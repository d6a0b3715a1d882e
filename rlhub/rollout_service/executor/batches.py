"""Turns finished groups into training batches: which groups may train, when failures stop the run, and the columns of a batch.

Delivery guarantees the staleness bound.  It checks a group when the group finishes and whenever training advances by a step; a
group with tokens beyond the bound is dropped (another prompt takes its place), has these tokens masked, or stays as it is for the
correction.  FailureLimit stops the run when something broken (a workflow, a reward, an engine that never gets new weights) breaks
every group: without it the run would generate forever and train nothing.

`to_batch` builds the columns that batch generation gives too, and those that only episodes have.  Rows are in the order of the
groups, with the samples of a prompt next to each other, and each trajectory of an episode is a row.  Prompts are padded on the
left and responses on the right to the longest of the batch, so that equal samples give an equal batch however they were
generated.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhub.agents.trajectory import LARGEST_SCORE, NOT_SAMPLED, Sampled, Trajectory
from rlhub.algorithms.inputs import COMPONENT
from rlhub.engines.rollout.base import FINISH_CODES
from rlhub.errors import WorkflowError
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rollout_service.executor.episode_groups import Group, StalePolicy, mask_older
from rlhub.rollout_service.executor.ledger import PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.rollout_service.executor.statistics import RolloutStatistics

logger = logging.getLogger(__name__)
ADDED, TOOL_REWARDS = "added_rewards", "tool_rewards"
"""Columns of the rewards that tools gave: (rows, T) float32 each on its token, and (rows,) float64 their sums."""
V = TypeVar("V")
Release = Callable[[Sequence[Sampled | None]], None]
"""Takes notice of samples that are trained, or will not be."""


def keep_nothing(samples: Sequence[Sampled | None]) -> None:
    """Is the Release of samples that are all here."""


class Delivery:
    """Keeps the finished groups until training takes them or they are too old.  Only one thread may use it at a time.

    release: called with the samples of groups that are trained or dropped.
    """

    def __init__(
        self,
        staleness: StalenessManager,
        ledger: PromptLedger,
        statistics: RolloutStatistics,
        policy: StalePolicy,
        release: Release = keep_nothing,
    ) -> None:
        self.staleness, self.ledger, self.statistics, self.policy = staleness, ledger, statistics, policy
        self.release = release
        self._waiting: list[tuple[int, Group]] = []  # with the version of each one's first token
        self._taken: dict[int, tuple[int, Group]] = {}
        self._requests: deque[GroupRequest] = deque()
        self._step = 0
        self._served_at = time.monotonic()
        self.dropped_in_a_row = 0

    @property
    def num_ready(self) -> int:
        """Returns the number of groups that wait for training."""
        return len(self._waiting)

    def add(self, group: Group) -> None:
        """Adds a finished group, unless it is already too old."""
        first_version = group.first_version
        if self._fresh(first_version, group):
            self._waiting.append((first_version, group))

    def ask(self, request: GroupRequest) -> None:
        """Queues a request for groups; `serve` answers it."""
        self._requests.append(request)

    def withdraw(self, request: GroupRequest) -> bool:
        """Withdraws a request; returns whether it was still waiting."""
        waiting = request in self._requests
        if waiting:
            self._requests.remove(request)
            self.statistics.wait_s += time.monotonic() - request.since
        return waiting

    def serve(self, *, ended: bool) -> None:
        """Answers the requests for which there are enough groups.  ended: no more groups will come, so a request gets the
        remaining ones."""
        while self._requests:
            request = self._requests[0]
            step = self.staleness.version + 1 if request.step is None else request.step
            self.age(step)
            if len(self._waiting) < request.count and not ended:
                return
            self._requests.popleft()
            taken = self._take(request.count, step)
            self._served(request)
            request.answer.set_result(taken)

    def _served(self, request: GroupRequest) -> None:
        """Measures how long training waited since it asked, in comparison with the time since it was served last."""
        now = time.monotonic()
        waited, passed = now - request.since, now - self._served_at
        self.statistics.wait_s += waited
        if self.staleness.version:  # at first there was nothing to train meanwhile
            self.staleness.on_take(min(waited / max(passed, 1e-9), 1.0), len(self._waiting))
        self._served_at = now

    def fail(self, error: BaseException) -> None:
        """Raises the error in all waiting requests."""
        while self._requests:
            self._requests.popleft().answer.set_exception(error)

    def age(self, step: int) -> None:
        """Applies the bound as of this step to the waiting groups."""
        if step > self._step:
            self._step = step
            self._waiting = [(version, group) for version, group in self._waiting if self._fresh(version, group)]

    def trained(self, step: int) -> None:
        """Marks the groups that were taken for this step or an earlier one as trained."""
        trained = [ordinal for ordinal, (taken_for, _) in self._taken.items() if taken_for <= step]
        for ordinal in trained:
            _, group = self._taken.pop(ordinal)
            self.release(group.scored)
        self.ledger.train(*trained)

    def give_back(self, ordinals: Iterable[int]) -> None:
        """Lets these groups, which were taken, wait again: they could not be read."""
        for ordinal in ordinals:
            _, group = self._taken.pop(ordinal)
            self._waiting.append((group.first_version, group))

    def take_lost(self, home: str) -> list[Group]:
        """Removes the waiting groups with samples in a process that has died, and returns them."""
        lost = [group for _, group in self._waiting if group.lies_in(home)]
        self._waiting = [(version, group) for version, group in self._waiting if not group.lies_in(home)]
        return lost

    def untrained(self) -> list[Group]:
        """Returns the groups that wait or were taken for an unfinished step, sorted by ordinal."""
        groups = [*(group for _, group in self._waiting), *(group for _, group in self._taken.values())]
        return sorted(groups, key=lambda group: group.ordinal)

    def _fresh(self, first_version: int, group: Group) -> bool:
        """Returns whether the group may train at the current step, after the stale policy has handled its old tokens."""
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
        self.release(group.scored)
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


@dataclass(slots=True, eq=False)
class GroupRequest:
    """A request of training for `count` groups, to be trained at `step` (None: the step after the current version)."""

    count: int
    step: int | None
    answer: Future[list[Group]] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


class FailureLimit:
    """Counts failed and rejected groups.  limit: the run stops after so many groups in a row that failed or arrived too old.
    Rejected groups are only logged."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._failed_in_a_row = self._num_failed = self._fruitless = 0

    def complete(self) -> None:
        """Records that all episodes of a group have ended well."""
        self._failed_in_a_row = 0

    def accepted(self) -> None:
        """Records that a group may be trained."""
        self._fruitless = 0

    def failed(self, ordinal: int, error: BaseException) -> WorkflowError | None:
        """Records that the group of this prompt failed; returns the error that stops the run if the limit is reached, otherwise
        None."""
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
        """Records that a group was rejected, for whatever reason."""
        self._fruitless += 1
        times, rest = divmod(self._fruitless, self.limit)
        if rest == 0 and _rare(times):
            logger.warning("%d groups in a row were rejected, the last for: %s", self._fruitless, reason)

    def dropped(self, in_a_row: int, staleness: StalenessManager) -> WorkflowError | None:
        """Returns the error that stops the run if so many groups in a row were too old that waiting cannot help, otherwise
        None."""
        if in_a_row < self.limit:
            return None
        return WorkflowError(
            f"{in_a_row} groups in a row were more than {staleness.max_staleness} versions old when they came, at version "
            f"{staleness.version}: the engine that generates does not get the new weights, or episodes take longer than so many "
            "training steps; then raise trainer.max_staleness, or set trainer.stale_policy=correct"
        )


def _rare(count: int) -> bool:
    """Returns whether to log this occurrence: the 1st, 2nd, 4th, 8th and so on."""
    return count.bit_count() == 1


def to_batch(groups: Sequence[Group], *, pad_id: int, vocab_size: int | None = None) -> DataProto:
    """Returns the columns of the rows of all groups; T is the length of the longest response:

    input_ids, attention_mask (rows, prompt + T); responses, response_mask, policy_version (rows, T) int64; rollout_log_probs
    (rows, T) float32; those of `row_columns`; the prompts' other columns.

    Only if tools gave rewards: added_rewards (rows, T) float32, which come on top of other rewards where advantages are computed.

    Only if the samples are scored: given_rewards (rows, T) float32 and the columns of `score_rows`.

    policy_version is NOT_SAMPLED for tokens that the policy did not write.  vocab_size: tokens outside of it raise WorkflowError.
    """
    trajectories = [trajectory for group in groups for trajectory in group.whole]
    columns = token_columns(trajectories, pad_id)
    columns |= row_columns(groups)
    check(columns, vocab_size)
    columns |= added_columns(trajectories, columns["responses"].shape[1])
    columns |= score_columns(groups, columns["responses"].shape[1])
    return DataProto.from_dict(columns, prompt_columns(groups))


def row_columns(groups: Sequence[Group]) -> dict[str, Tensor]:
    """Returns the columns of one number a row that follow from the samples' numbers: prompt_length, response_length,
    finish_reason, ordinal, uid (rows,) int64; only if an episode has several rows or none: episode_id (rows,) int64, the number
    of its sample in the batch, from 0.  Samples that failed are counted there, so that a mini-batch keeps its prompts.  Only if
    tools gave rewards: tool_rewards (rows,) float64, their sums.

    uid: equal for the rows whose rewards are compared: those of a prompt, and where episodes have several rewards, those of them
    with the same name in `comparison`.
    """
    rows = [row for group in groups for row in group.rows]
    counts = [count for group in groups for count in group.row_counts]
    compared: dict[tuple[int, str], int] = {}
    numbers: dict[str, Any] = {
        "prompt_length": [row.prompt_length for row in rows],
        "response_length": [row.response_length for row in rows],
        "finish_reason": [FINISH_CODES[row.finish_reason] for row in rows],
        "ordinal": [group.ordinal for group in groups for _ in group.rows],
        "uid": [
            compared.setdefault((number, row.comparison), len(compared))
            for number, group in enumerate(groups)
            for row in group.rows
        ],
    }
    if any(count != 1 for count in counts):
        numbers["episode_id"] = np.repeat(np.arange(len(counts)), counts)
    columns = {name: torch.from_numpy(np.array(column, dtype=np.int64)) for name, column in numbers.items()}
    if any(row.added_rewards is not None for row in rows):
        columns[TOOL_REWARDS] = torch.tensor([sum(row.added_rewards or ()) for row in rows], dtype=torch.float64)
    return columns


def check(columns: Mapping[str, Tensor], vocab_size: int | None) -> None:
    """Raises WorkflowError for values that would corrupt training silently: tokens outside the vocabulary, log-probs that are not
    finite."""
    tokens, log_probs = columns["responses"].numpy(), columns["rollout_log_probs"].numpy()
    finite = np.isfinite(log_probs).all(1)
    if not finite.all():
        ordinal = int(columns["ordinal"][int(finite.argmin())])
        raise WorkflowError(f"a sample of prompt {ordinal} has a log-prob that is not finite; check dtype and sampling settings")
    if vocab_size is not None:
        written = columns["attention_mask"].numpy()[:, -tokens.shape[1] :] == 1
        outside = written & ((tokens < 0) | (tokens >= vocab_size))
        if outside.any():
            row, position = np.argwhere(outside)[0]
            raise WorkflowError(
                f"a sample of prompt {int(columns['ordinal'][row])} has token id {tokens[row, position]}, outside the vocabulary "
                f"of {vocab_size}"
            )


def token_columns(trajectories: Sequence[Trajectory], pad_id: int) -> dict[str, Tensor]:
    """Returns the columns that follow from the tokens alone."""
    prompts, prompt_mask = left_padded([trajectory.prompt_ids for trajectory in trajectories], pad_id)
    lengths = np.array([len(trajectory.response_ids) for trajectory in trajectories], dtype=np.int64)
    filled = np.arange(lengths.max())[None, :] < lengths[:, None]

    def padded(column: Iterable[Sequence[Any]], fill: float, dtype: Any) -> Tensor:
        return torch.from_numpy(placed(column, filled, fill, dtype))

    responses = placed((t.response_ids for t in trajectories), filled, pad_id, np.int64)
    return {
        "input_ids": torch.from_numpy(np.concatenate([prompts, responses], 1)),
        "attention_mask": torch.from_numpy(np.concatenate([prompt_mask, filled], 1).astype(np.int64)),
        "responses": torch.from_numpy(responses),
        "response_mask": padded((t.response_mask for t in trajectories), 0, np.int64),
        "rollout_log_probs": padded((t.rollout_log_probs for t in trajectories), 0.0, np.float32),
        "policy_version": padded((t.versions for t in trajectories), NOT_SAMPLED, np.int64),
    }


def placed(column: Iterable[Sequence[Any]], filled: np.ndarray, fill: float, dtype: Any) -> np.ndarray:
    """Returns an array with the rows' values in order where `filled` (rows, width) is True, and `fill` elsewhere.

    Raises ValueError if the number of values differs from the number of True entries.
    """
    values = np.full(filled.shape, fill, dtype=dtype)
    values[filled] = np.fromiter(chain.from_iterable(column), dtype)
    return values


def left_padded(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens (int64) and a mask of their positions (bool), both (rows, longest)."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    width = int(lengths.max())
    filled = np.arange(width)[None, :] >= width - lengths[:, None]
    return placed(rows, filled, pad_id, np.int64), filled


def added_columns(trajectories: Sequence[Trajectory], width: int) -> dict[str, Tensor]:
    """Returns the column of the tools' rewards, or no column if no tool gave a reward."""
    if all(trajectory.added_rewards is None for trajectory in trajectories):
        return {}
    added = torch.zeros(len(trajectories), width)
    for row, trajectory in enumerate(trajectories):
        if trajectory.added_rewards is not None:
            added[row, : len(trajectory.added_rewards)] = torch.tensor(trajectory.added_rewards)
    return {ADDED: added}


def with_tool_rewards(scores: Tensor, valid: Tensor, tools: Tensor | None) -> Tensor:
    """Returns scores (rows,) float32 with what tools gave, tools (rows,) float64; a sample without a valid score gets none."""
    return scores if tools is None else (scores.double() + tools * valid).float()


def score_columns(groups: Sequence[Group], width: int) -> dict[str, Tensor]:
    """Returns given_rewards (rows, width) float32, the rewards without those of tools, and the columns of `score_rows`; no
    columns if no sample has rewards.  Raises what that raises."""
    columns = score_rows(groups)
    if not columns:
        return {}
    rewards = columns["given_rewards"] = torch.zeros(len(columns["scores"]), width)
    for row, trajectory in enumerate(trajectory for group in groups for trajectory in group.whole):
        assert trajectory.rewards is not None, "all have some"
        rewards[row, : len(trajectory.rewards)] = torch.tensor(trajectory.rewards)
    return columns


def score_rows(groups: Sequence[Group]) -> dict[str, Tensor]:
    """Returns scores (rows,) float32, with the rewards of tools, valid (rows,) bool and reward/<name> (rows,) float64, the
    scorer's other numbers; no columns if no sample has rewards.

    Raises WorkflowError if only some samples have them, because half a batch cannot be scored later, or for rewards that are no
    finite float32.
    """
    rows = [(group.ordinal, row) for group in groups for row in group.rows]
    if all(row.rewards is None for _, row in rows):
        return {}
    totals = []
    for ordinal, row in rows:
        if row.rewards is None:
            raise WorkflowError(f"prompt {ordinal} has samples without rewards in a batch in which others have them")
        if not all(abs(reward) <= LARGEST_SCORE for reward in (*row.rewards, sum(row.rewards))):
            raise WorkflowError(f"a sample of prompt {ordinal} has rewards that are, or add up to, no finite float32")
        totals.append(float(sum(row.rewards)))
    columns = _scored_rows(groups)
    tools = row_columns(groups).get(TOOL_REWARDS)
    return {"scores": with_tool_rewards(torch.tensor(totals), columns["valid"], tools)} | columns


def _scored_rows(groups: Sequence[Group]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for group in groups for numbers in group.numbers for name in numbers)
    columns = {COMPONENT + name: number_column(groups, name) for name in names}
    return {"valid": torch.tensor(of_rows(groups, [valid for group in groups for valid in group.valid]))} | columns


def number_column(groups: Sequence[Group], name: str) -> Tensor:
    """Returns one of the scorer's numbers, (rows,) float64, the same for all rows of a sample, 0 for one without a valid score.
    Raises WorkflowError if a sample with a valid score lacks it."""
    values = []
    for group in groups:
        for valid, numbers in zip(group.valid, group.numbers, strict=True):
            if valid and name not in numbers:
                raise WorkflowError(f"the scorer gave no {name!r} for a sample of prompt {group.ordinal}, which others have")
            values.append(numbers.get(name, 0.0))
    return torch.tensor(of_rows(groups, values), dtype=torch.float64)


def of_rows(groups: Sequence[Group], values: Sequence[V]) -> list[V]:
    """Returns the value of its sample for each row.  values: one per sample of all groups."""
    counts = [count for group in groups for count in group.counts]
    return [value for value, count in zip(values, counts, strict=True) for _ in range(count)]


def prompt_columns(groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """Returns the prompts' other columns, with one value per row."""
    rows: list[Mapping[str, Any]] = [group.item.row for group in groups for _ in group.rows]
    return {name: object_array(row[name] for row in rows) for name in rows[0]} if rows else {}


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns `episode/<name>`, the mean of each of the episodes' metrics over the episodes that have it."""
    found: dict[str, list[float]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            for name, value in trajectory.metrics.items():
                found.setdefault(f"episode/{name}", []).append(float(value))
    return {name: sum(values) / len(values) for name, values in found.items()}
