"""Scores of finished episodes while others still run, and the group filter that dynamic sampling needs there.

The reward function judges each row alone, so its outcome can be there before the batch is: only what a manager makes of the
outcomes (penalties, the policy for failures) waits for the whole batch, and is then the same as without haste.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhub.agents.remote.holders import Holders
from rlhub.agents.trajectory import Row, Trajectory, TrajectoryRef, answer_of, rows_of
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards import RewardManager, RewardOutcome
from rlhub.rewards.base import OUTCOMES
from rlhub.rewards.combine import CombinedManager
from rlhub.rewards.managers import NaiveManager
from rlhub.rewards.rows import RowScorer
from rlhub.rollout_service.executor.batches import prompt_columns, row_columns, score_rows
from rlhub.rollout_service.executor.episode_groups import Group
from rlhub.trainer.ppo.dynamic_sampling import groups_with_signal
from rlhub.trainer.ppo.group_filter import GroupFilter, scored_groups
from rlhub.trainer.ppo.scoring import Scorer

logger = logging.getLogger(__name__)


def function_manager(reward: RewardManager | None) -> NaiveManager | None:
    """Returns the part of the reward that judges each row alone, if there is one."""
    if isinstance(reward, CombinedManager):
        return function_manager(reward.function)
    return reward if isinstance(reward, NaiveManager) else None


@dataclass(slots=True)
class OutcomeStore:
    """Outcomes by prompt, from the end of its group to its training; JSON-able."""

    by_ordinal: dict[int, list[RewardOutcome]] = field(default_factory=dict)

    def put(self, ordinal: int, outcomes: list[RewardOutcome]) -> None:
        self.by_ordinal[ordinal] = outcomes

    def take(self, group: Group) -> Sequence[RewardOutcome | None]:
        """Returns those of a group's samples; None for each where the group was not scored."""
        return self.by_ordinal.get(group.ordinal, [None] * len(group.trajectories))[: len(group.trajectories)]

    def take_baseline(self, group: Group) -> RewardOutcome | None:
        """Returns that of its greedy response."""
        return self.by_ordinal[group.ordinal][len(group.trajectories)] if group.ordinal in self.by_ordinal else None

    def forget(self, frontier: int) -> None:
        """Drops the outcomes of all prompts before this ordinal, which have ended."""
        for ordinal in [ordinal for ordinal in list(self.by_ordinal) if ordinal < frontier]:
            del self.by_ordinal[ordinal]

    def state(self, finished: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """Returns the outcomes of those of these groups that were scored without failure: others are scored again."""
        ordinals = [group["ordinal"] for group in finished]
        kept = {ordinal: self.by_ordinal[ordinal] for ordinal in ordinals if ordinal in self.by_ordinal}
        return {
            str(ordinal): [{"score": outcome.score, "details": outcome.details} for outcome in outcomes]
            for ordinal, outcomes in kept.items()
            if all(outcome.error is None for outcome in outcomes)
        }

    def load_state(self, state: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self.by_ordinal = {int(ordinal): [RewardOutcome(**one) for one in outcomes] for ordinal, outcomes in state.items()}


@dataclass(slots=True)
class GroupScoring:
    """The executor's hook that scores a group's samples as soon as all of them are there.

    scorer: scores those whose tokens are here; None scores nothing.  holders: let the other processes score theirs.
    """

    scorer: RowScorer | None
    outcomes: OutcomeStore
    holders: Holders | None = None

    async def __call__(self, group: Group) -> None:
        if self.scorer is None or all(sample.rewards is not None for sample in group.scored):
            return
        missing = [answer_of(sample) for sample in group.scored if sample.rewards is None]
        found = iter(await self._score(self.scorer, group.item.row, missing))
        self.outcomes.put(
            group.ordinal,
            [next(found) if one.rewards is None else RewardOutcome(score=float(sum(one.rewards))) for one in group.scored],
        )

    async def _score(self, scorer: RowScorer, prompt: Mapping[str, Any], samples: Sequence[Row]) -> list[RewardOutcome]:
        """Returns the outcomes of responses, in order.  Raises HolderLostError."""
        kept = [sample for sample in samples if isinstance(sample, TrajectoryRef)]
        there = iter(await self.holders.score(kept, prompt) if self.holders is not None and kept else ())
        here = iter(await scorer.score(prompt, [one.response_ids for one in samples if isinstance(one, Trajectory)]))
        return [next(there) if isinstance(sample, TrajectoryRef) else next(here) for sample in samples]


@dataclass(slots=True)
class SignalFilter:
    """The executor's filter for dynamic sampling (see dynamic_sampling.py): whether a finished group's samples differ, and
    whether the user's own filter keeps it.

    scorer: of one group, from what its samples were scored; failures pass as samples without a score.
    most: groups without signal in a row that are turned down; the next ones train, as whole batches are filled up.
    differ: whether samples must differ.  own: the user's own filter.  note: called with the scored rows of a group that is turned
    down.
    """

    scorer: Scorer
    outcomes: OutcomeStore
    most: int
    differ: bool = True
    own: GroupFilter | None = None
    note: Callable[[DataProto], None] | None = None
    _without: int = 0

    def __call__(self, group: Group) -> bool:
        compared = dict.fromkeys(row.comparison for row in group.rows)
        by_name = [self._scored(group, name) for name in compared]
        if self._keeps(by_name):
            self._without = 0
            return True
        self._without += 1
        if self.note is not None and self._without <= self.most:
            self.note(by_name[0])
        if self._without == self.most + 1:
            logger.warning(
                "dynamic sampling: %d groups in a row had no signal (algorithm.filter_groups.max_num_gen_batches); those that "
                "follow fill the batch. The problems may be too easy or too hard for the policy: raise the bound or "
                "actor_rollout_ref.rollout.n, or change the data",
                self.most,
            )
        return self._without > self.most

    def _keeps(self, by_name: Sequence[DataProto]) -> bool:
        if self.differ and not any(bool(groups_with_signal(rows, len(rows))[0]) for rows in by_name):
            return False
        return self.own is None or any(self.own(group) for rows in by_name for group in scored_groups(rows, len(rows)))

    def _scored(self, group: Group, comparison: str) -> DataProto:
        """Returns a scored row for each of the group's episodes that have a reward of that name; of several rows the last stands
        for its episode."""
        outcomes, rows, valid, numbers = self.outcomes.take(group), [], [], []
        kept = []
        for sample, outcome, scored, own in zip(group.trajectories, outcomes, group.valid, group.numbers, strict=True):
            named = [row for row in rows_of(sample) if row.comparison == comparison]
            if named:
                rows.append(named[-1])
                kept.append(outcome)
                valid.append(scored)
                numbers.append(own)
        chosen = [replace(group, trajectories=rows, valid=valid, numbers=numbers)]
        batch = DataProto.from_dict(row_columns(chosen) | score_rows(chosen), prompt_columns(chosen))
        batch.non_tensor_batch[OUTCOMES] = object_array(kept)
        self.scorer.score_rows(batch)
        return batch
