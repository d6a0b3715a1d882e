"""Validation's episodes as a batch: what gives nothing is an empty answer, what could not be scored says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhub.agents.trajectory import Episode, Trajectory
from rlhub.agents.workflows.base import EpisodeData
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.rewards.base import OUTCOMES
from rlhub.trainer.ppo.episodes import EpisodeSamples
from rlhub.utils.aio.results import Reject
from rlhub.utils.aio.task_runner import AsyncTaskRunner


class Scored:
    """Prompt 0 is answered, prompt 1 given up, and the reward that prompt 2 asks for fails."""

    def __init__(self, own_rewards: bool | int) -> None:
        """A number: of the one sample that has a reward of its own."""
        self.own_rewards = own_rewards

    async def arun_episode(self, engine: Any, data: EpisodeData) -> Trajectory:
        if data.ordinal == 1:
            raise Reject("its generation was aborted")
        if data.ordinal == 2:
            raise RewardError("scoring a turn failed: timeout")
        made = Trajectory(
            prompt_ids=[3], response_ids=[5, 6, 7], response_mask=[1, 1, 0], rollout_log_probs=[-1.0] * 3, versions=[0, 0, -1]
        )
        if self.own_rewards is True or (self.own_rewards is not False and self.own_rewards == data.sample):
            made.set_reward(0.75)
        return made


class Branched(Scored):
    """Two conversations."""

    async def arun_episode(self, engine: Any, data: EpisodeData) -> Any:
        rows = [await super(Branched, self).arun_episode(engine, data) for _ in range(2)]
        rows[0].response_ids = [9, 9, 9]
        return Episode(trajectories=rows)


@pytest.mark.parametrize("own_rewards", [True, False, 1], ids=["own rewards", "the run's reward", "both"])
@pytest.mark.parametrize("workflow", [Scored, Branched], ids=["one trajectory", "two trajectories"])
def test_an_episode_without_a_score_is_told_from_an_empty_answer(own_rewards: bool | int, workflow: type[Scored]) -> None:
    runner = AsyncTaskRunner(name="episodes")
    try:
        config = RolloutConfig()
        config.val_kwargs.n, config.agent.episode_timeout_s = 2, 30.0
        workflows: Any = SimpleNamespace(of=lambda row: workflow(own_rewards))
        samples = EpisodeSamples(config, SimpleNamespace(), workflows, runner.loop, seed=1, pad_id=0)  # type: ignore[arg-type]
        prompts = {"prompts": torch.full((3, 1), 3), "attention_mask": torch.ones(3, 1).long(), "ordinal": torch.arange(3)}
        batch = samples.validation(DataProto.from_dict(prompts, {"data_source": ["x"] * 3}))
    finally:
        runner.close()
    assert batch.batch["ordinal"].tolist() == [0, 0, 1, 1, 2, 2] and 9 not in batch.batch["responses"]
    known = batch.non_tensor_batch[OUTCOMES]
    failed = [None if outcome is None or outcome.error is None else outcome.error.message for outcome in known]
    assert failed == [None] * 4 + ["scoring a turn failed: timeout"] * 2
    if own_rewards is True:
        assert batch.batch["scores"].tolist() == [0.75, 0.75, 0.0, 0.0, 0.0, 0.0]
        assert batch.batch["given_rewards"][0].tolist() == [0.0, 0.75, 0.0]
    else:
        assert "scores" not in batch.batch.keys()
        scores = [None if outcome is None else outcome.score for outcome in known[:4]]
        assert scores == ([None] * 4 if own_rewards is False else [None, 0.75, 0.0, 0.0])
