"""Scores of finished episodes while others still run.

The reward function judges each row alone, so its outcome can be there before the batch is: only what a manager makes of the
outcomes (penalties, the policy for failures) waits for the whole batch, and is then the same as without haste.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhub.errors import RewardError
from rlhub.rewards import RewardManager, RewardOutcome, RewardRequest
from rlhub.rewards.combine import CombinedManager
from rlhub.rewards.naive import NUMBERS, NaiveManager
from rlhub.rollout_service.executor.episode_groups import Group


def function_manager(reward: RewardManager | None) -> NaiveManager | None:
    """The part of the reward that judges each row alone, if there is one."""
    if isinstance(reward, CombinedManager):
        return function_manager(reward.function)
    return reward if isinstance(reward, NaiveManager) else None


async def no_turn_scores(row: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
    """`agents.workflows.base.Score` where no function judges a row alone."""
    raise RewardError("a workflow asks for the reward of a turn, but no reward function is on: set reward_model.function_weight")


@dataclass(slots=True)
class _Asked:
    requests: Sequence[RewardRequest]
    answer: asyncio.Future[list[RewardOutcome]]


class AheadScorer:
    """All methods on one event loop.  Requests that come while the pool is at work are scored together in its next turn."""

    def __init__(self, manager: NaiveManager) -> None:
        self.manager = manager
        self._pool, self._tokenizer = manager.parts.pool, manager.parts.tokenizer
        self._waiting: list[_Asked] = []
        self._work: asyncio.Task[None] | None = None

    async def outcomes(self, group: Group) -> list[RewardOutcome]:
        """One a sample, and the baseline's after them; the workflow's own reward where it set one."""
        missing = [trajectory for trajectory in group.scored if trajectory.rewards is None]
        texts = self._tokenizer.batch_decode([list(t.response_ids) for t in missing], skip_special_tokens=True) if missing else []
        found = iter(await self.score([request_of(group.item.row, text) for text in texts]))
        return [
            next(found) if trajectory.rewards is None else RewardOutcome(score=float(sum(trajectory.rewards)))
            for trajectory in group.scored
        ]

    async def score_text(self, row: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
        """`agents.workflows.base.Score`: for workflows that want the reward of a turn."""
        (outcome,) = await self.score([request_of(row, text)])
        if outcome.error is not None:
            raise RewardError(f"scoring a turn failed: {outcome.error.kind}: {outcome.error.message}")
        return outcome.score, {name: float(item) for name, item in outcome.details.items() if isinstance(item, NUMBERS)}

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """One outcome a request, in order."""
        if not requests:
            return []
        loop = asyncio.get_running_loop()
        asked = _Asked(requests, loop.create_future())
        self._waiting.append(asked)
        if self._work is None:
            self._work = loop.create_task(self._run())
        return await asked.answer

    async def _run(self) -> None:
        await self._gather()
        while self._waiting:
            asked, self._waiting = self._waiting, []
            requests = [request for one in asked for request in one.requests]
            try:
                found = iter(await asyncio.to_thread(self._pool.score, requests))
            except Exception as error:  # noqa: BLE001  the thread's boundary: whoever asked gets the error
                for one in asked:
                    if not one.answer.done():
                        one.answer.set_exception(error)
                continue
            for one in asked:
                outcomes = [next(found) for _ in one.requests]
                if not one.answer.done():
                    one.answer.set_result(outcomes)
        self._work = None

    async def _gather(self) -> None:
        """Groups that end together ask in one pass of the loop after the other: wait for the first in which none does."""
        seen = 0
        while len(self._waiting) > seen:
            seen = len(self._waiting)
            await asyncio.sleep(0)


def request_of(row: Mapping[str, Any], text: str) -> RewardRequest:
    """What the reward function is told of a response to this prompt."""
    return RewardRequest(
        data_source=row["data_source"],
        solution_str=text,
        ground_truth=row["ground_truth"],
        extra_info=row["extra_info"],
    )


@dataclass(slots=True)
class KeptOutcomes:
    """Outcomes by prompt, from the end of its group to its training; JSON-able."""

    by_ordinal: dict[int, list[RewardOutcome]] = field(default_factory=dict)

    def put(self, ordinal: int, outcomes: list[RewardOutcome]) -> None:
        self.by_ordinal[ordinal] = outcomes

    def take(self, group: Group) -> Sequence[RewardOutcome | None]:
        """Of the samples of a group that is about to train; None of a row that was not scored ahead."""
        return self.by_ordinal.get(group.ordinal, [None] * len(group.trajectories))[: len(group.trajectories)]

    def take_baseline(self, group: Group) -> RewardOutcome | None:
        """Of its greedy response."""
        return self.by_ordinal[group.ordinal][len(group.trajectories)] if group.ordinal in self.by_ordinal else None

    def forget(self, frontier: int) -> None:
        """No prompt before this ordinal will be asked for again."""
        for ordinal in [ordinal for ordinal in list(self.by_ordinal) if ordinal < frontier]:
            del self.by_ordinal[ordinal]

    def state(self, finished: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """Of these groups, those that were scored without failure: others are scored again."""
        ordinals = [group["ordinal"] for group in finished]
        kept = {ordinal: self.by_ordinal[ordinal] for ordinal in ordinals if ordinal in self.by_ordinal}
        return {
            str(ordinal): [{"score": outcome.score, "details": outcome.details} for outcome in outcomes]
            for ordinal, outcomes in kept.items()
            if all(outcome.error is None for outcome in outcomes)
        }

    def load_state(self, state: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        self.by_ordinal = {int(ordinal): [RewardOutcome(**one) for one in outcomes] for ordinal, outcomes in state.items()}
