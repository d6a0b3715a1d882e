"""Validation through the rollout service: the same workflows, on one version of the policy, beside training.

A replica is pinned to the version; what runs there counts in no bound on staleness.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlhub.agents.trajectory import NOT_SAMPLED, Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards import RewardFailure, RewardOutcome
from rlhub.rewards.naive import OUTCOMES
from rlhub.rollout_service.executor.batches import to_batch
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.rollout_service.router import Pin, Router
from rlhub.trainer.ppo.episodes import Workflows
from rlhub.trainer.ppo.positions import prompt_items
from rlhub.utils.aio.results import Reject
from rlhub.utils.seeding import sample_seed


@dataclass(frozen=True, slots=True)
class _Sample:
    """failed: why the episode has no reward; None: it has one, or the run's reward scores it."""

    trajectory: Trajectory
    failed: RewardOutcome | None = None


def settle_rewards(samples: Sequence[_Sample]) -> list[RewardOutcome | None]:
    """What is known of each sample's score besides the rewards in its trajectory.

    Where workflows set rewards of their own, an episode that gave nothing has a reward of 0.  Where only some do (rows name
    their workflows), their sums go with the outcomes, and the run's reward scores the others, as in training.
    """
    made = [sample.trajectory for sample in samples]
    outcomes = [sample.failed for sample in samples]
    if all(trajectory.rewards is None for trajectory in made):
        return outcomes
    mixed = any(trajectory.rewards is None and any(trajectory.response_mask) for trajectory in made)
    for index, trajectory in enumerate(made):
        if trajectory.rewards is None and not any(trajectory.response_mask):
            trajectory.set_reward(0.0)
        if mixed and trajectory.rewards is not None:
            outcomes[index] = outcomes[index] or RewardOutcome(score=float(sum(trajectory.rewards)))
            trajectory.rewards = None
    return outcomes


class EpisodeSamples:
    """See validation.ValidationSamples.  Between `pin` and `release` the version is that of the pin, else the newest."""

    def __init__(
        self,
        config: RolloutConfig,
        router: Router,
        workflows: Workflows,
        loop: asyncio.AbstractEventLoop,
        *,
        seed: int,
        pad_id: int,
    ) -> None:
        self.config, self.router, self.workflows, self.loop = config, router, workflows, loop
        self.seed, self.pad_id = seed, pad_id
        self._pin: Pin | None = None

    def pin(self, version: int) -> None:
        """Keep a replica at this version, which must be the newest."""
        self._pin = self._on_loop(self.router.pin(version))

    def release(self) -> None:
        """Let the replica go on."""
        pin, self._pin = self._pin, None
        if pin is not None:
            self.loop.call_soon_threadsafe(pin.release)

    def validation(self, prompts: DataProto) -> DataProto:
        """val_kwargs' samples per prompt, neighbours in prompt order."""
        made = self._on_loop(self._episodes(self._pin or self.router, list(prompt_items(prompts))))
        outcomes = settle_rewards([sample for _, samples in made for sample in samples])
        groups = [Group(item=item, trajectories=[sample.trajectory for sample in samples]) for item, samples in made]
        batch = to_batch(groups, pad_id=self.pad_id)
        batch.non_tensor_batch[OUTCOMES] = object_array(outcomes)
        return batch

    def _on_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _episodes(self, engine: EpisodeEngine, items: list[PromptItem]) -> list[tuple[PromptItem, list[_Sample]]]:
        samples = range(self.config.val_kwargs.n)
        made = await asyncio.gather(*(self._episode(engine, item, sample) for item in items for sample in samples))
        return [(item, made[len(samples) * row : len(samples) * (row + 1)]) for row, item in enumerate(items)]

    async def _episode(self, engine: EpisodeEngine, item: PromptItem, sample: int) -> _Sample:
        """An episode that gives nothing counts as an empty answer: leaving it out would flatter the policy.  One in which a
        reward failed is a sample whose scoring failed, as any other."""
        seed = sample_seed(self.seed, item.ordinal, sample)
        data = EpisodeData(prompt_ids=item.prompt_ids, ordinal=item.ordinal, sample=sample, seed=seed, row=item.row)
        running = self.workflows.of(item.row).arun_episode(engine, data)
        try:
            found = await asyncio.wait_for(running, self.config.agent.episode_timeout_s)
        except (Reject, TimeoutError):
            found = None
        except RewardError as error:
            return _Sample(self._empty(item), RewardOutcome(error=RewardFailure(kind="raised", message=str(error))))
        return _Sample(found or self._empty(item))

    def _empty(self, item: PromptItem) -> Trajectory:
        return Trajectory(
            prompt_ids=list(item.prompt_ids),
            response_ids=[self.pad_id],
            response_mask=[0],
            rollout_log_probs=[0.0],
            versions=[NOT_SAMPLED],
            finish_reason="abort",
        )
