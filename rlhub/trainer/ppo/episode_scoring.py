"""Scores of finished episodes while others still run, and the group filter that dynamic sampling needs there.

The reward function judges each row alone, so its outcome can be there before the batch is: only what a manager makes of the
outcomes (penalties, the policy for failures) waits for the whole batch, and is then the same as without haste.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhub.agents.trajectory import Sampled, Trajectory, TrajectoryRef
from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards import RewardManager, RewardOutcome, RewardRequest
from rlhub.rewards.combine import CombinedManager
from rlhub.rewards.managers import NUMBERS, OUTCOMES, NaiveManager
from rlhub.rollout_service.executor.batches import to_batch
from rlhub.rollout_service.executor.episode_groups import Group
from rlhub.trainer.ppo.dynamic_sampling import groups_with_signal
from rlhub.trainer.ppo.scoring import Scorer

logger = logging.getLogger(__name__)


def function_manager(reward: RewardManager | None) -> NaiveManager | None:
    """Returns the part of the reward that judges each row alone, if there is one."""
    if isinstance(reward, CombinedManager):
        return function_manager(reward.function)
    return reward if isinstance(reward, NaiveManager) else None


async def no_turn_scores(row: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
    """Is `agents.workflows.base.Score` where no function judges a row alone."""
    raise RewardError("a workflow asks for the reward of a turn, but no reward function is on: set reward_model.function_weight")


@dataclass(slots=True)
class _ScoringRequest:
    rows: Sequence[RewardRequest]
    outcomes: asyncio.Future[list[RewardOutcome]]


class EpisodeScorer:
    """Scores episodes by the reward function.  All methods run on one event loop; requests that come while the function's
    processes are at work are scored together in their next turn."""

    def __init__(self, manager: NaiveManager) -> None:
        self.manager = manager
        self._pool, self._tokenizer = manager.parts.pool, manager.parts.tokenizer
        self._waiting: list[_ScoringRequest] = []
        self._work: asyncio.Task[None] | None = None

    async def outcomes(self, group: Group) -> list[RewardOutcome]:
        """Returns one outcome a sample, and the baseline's after them; the workflow's own reward where it set one."""
        missing = [trajectory for trajectory in group.scored if trajectory.rewards is None]
        found = iter(await self.score([request_of(group.item.row, text) for text in self._texts(missing)]))
        return [
            next(found) if trajectory.rewards is None else RewardOutcome(score=float(sum(trajectory.rewards)))
            for trajectory in group.scored
        ]

    def _texts(self, samples: Sequence[Sampled]) -> Iterator[str]:
        """Returns the responses without special tokens; those of samples whose tokens are not here came decoded."""
        here = [list(sample.response_ids) for sample in samples if isinstance(sample, Trajectory)]
        decoded = iter(self._tokenizer.batch_decode(here, skip_special_tokens=True) if here else [])
        for sample in samples:
            if isinstance(sample, Trajectory):
                yield next(decoded)
            else:
                assert sample.response_text is not None, "the process that keeps the tokens decodes them"
                yield sample.response_text
                sample.response_text = None

    async def score_text(self, row: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
        """Is `agents.workflows.base.Score`, for workflows that want the reward of a turn."""
        (outcome,) = await self.score([request_of(row, text)])
        if outcome.error is not None:
            raise RewardError(f"scoring a turn failed: {outcome.error.kind}: {outcome.error.message}")
        return outcome.score, {name: float(item) for name, item in outcome.details.items() if isinstance(item, NUMBERS)}

    async def score(self, rows: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """Returns one outcome a row, in order."""
        if not rows:
            return []
        loop = asyncio.get_running_loop()
        request = _ScoringRequest(rows, loop.create_future())
        self._waiting.append(request)
        if self._work is None:
            self._work = loop.create_task(self._run())
        return await request.outcomes

    async def _run(self) -> None:
        await self._gather()
        while self._waiting:
            requests, self._waiting = self._waiting, []
            rows = [row for request in requests for row in request.rows]
            try:
                found = iter(await asyncio.to_thread(self._pool.score, rows))
            except Exception as error:  # noqa: BLE001  the thread's boundary: whoever asked gets the error
                for request in requests:
                    if not request.outcomes.done():
                        request.outcomes.set_exception(error)
                continue
            for request in requests:
                outcomes = [next(found) for _ in request.rows]
                if not request.outcomes.done():
                    request.outcomes.set_result(outcomes)
        self._work = None

    async def _gather(self) -> None:
        """Groups that end together ask in one pass of the loop after the other: waits for the first in which none does."""
        known = 0
        while len(self._waiting) > known:
            known = len(self._waiting)
            await asyncio.sleep(0)


def request_of(row: Mapping[str, Any], text: str) -> RewardRequest:
    """Returns what the reward function reads of a response to this prompt."""
    return RewardRequest(
        data_source=row["data_source"],
        solution_str=text,
        ground_truth=row["ground_truth"],
        extra_info=row["extra_info"],
    )


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
    """The executor's hook that scores a group's samples as soon as all of them are there.  scorer: None scores nothing then."""

    scorer: EpisodeScorer | None
    outcomes: OutcomeStore

    async def __call__(self, group: Group) -> None:
        if self.scorer is not None and any(trajectory.rewards is None for trajectory in group.scored):
            self.outcomes.put(group.ordinal, await self.scorer.outcomes(group))


@dataclass(slots=True)
class SignalFilter:
    """The executor's filter for dynamic sampling (see dynamic_sampling.py): whether a finished group's samples differ.

    scorer: of one group, from what its samples were scored; failures pass as samples without a score.
    most: groups without signal in a row that are turned down; the next ones train, as whole batches are filled up.
    """

    scorer: Scorer
    outcomes: OutcomeStore
    pad_id: int
    most: int
    _without: int = 0

    def __call__(self, group: Group) -> bool:
        samples = [sample.outline() if isinstance(sample, TrajectoryRef) else sample for sample in group.trajectories]
        batch: DataProto = to_batch([replace(group, trajectories=samples)], pad_id=self.pad_id)
        batch.non_tensor_batch[OUTCOMES] = object_array(list(self.outcomes.take(group)))
        self.scorer.score_rows(batch)
        if bool(groups_with_signal(batch, len(group.trajectories))[0]):
            self._without = 0
            return True
        self._without += 1
        if self._without == self.most + 1:
            logger.warning(
                "dynamic sampling: %d groups in a row had no signal (algorithm.filter_groups.max_num_gen_batches); those that "
                "follow fill the batch. The problems may be too easy or too hard for the policy: raise the bound or "
                "actor_rollout_ref.rollout.n, or change the data",
                self.most,
            )
        return self._without > self.most
