"""An episode's reward and the tokens that it may stand on."""

from __future__ import annotations

import pytest
import torch

from rlhub.agents.trajectory import NOT_SAMPLED, Episode, Trajectory
from rlhub.agents.workflows.turns import Transcript
from rlhub.algorithms.estimation import compute_advantages
from rlhub.algorithms.statistics import HERE
from rlhub.config.sections.algorithm import AlgorithmConfig
from rlhub.errors import WorkflowError
from rlhub.rollout_service.executor.batches import to_batch
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem, mask_older
from rlhub.utils.aio.results import Reject


def episode(mask: list[int], versions: list[int] | None = None, rewards: list[float] | None = None) -> Trajectory:
    return Trajectory(
        prompt_ids=[7],
        response_ids=list(range(len(mask))),
        response_mask=mask,
        rollout_log_probs=[0.0] * len(mask),
        versions=versions or [0 if written else NOT_SAMPLED for written in mask],
        rewards=rewards,
    )


@pytest.mark.parametrize(
    ("mask", "expected"),
    [([1, 1], [0.0, 2.0]), ([1, 0, 1, 0, 0], [0.0, 0.0, 2.0, 0.0, 0.0]), ([0, 1, 0], [0.0, 2.0, 0.0]), ([0, 0], [0.0, 0.0])],
    ids=["one turn", "a closing observation", "context around", "nothing written"],
)
def test_an_episodes_reward_is_on_the_last_token_that_the_policy_wrote(mask: list[int], expected: list[float]) -> None:
    """After a closing observation the last token of all is nobody's: a reward there would train nothing."""
    made = episode(mask)
    made.set_reward(2.0)
    assert made.rewards == expected


def test_a_turn_without_tokens_cannot_be_credited() -> None:
    transcript = Transcript(prompt_ids=[7], budget=9, scored=True)
    assert transcript.add_context([3, 4])
    with pytest.raises(Reject, match="the policy wrote no token"):
        transcript.add_reward(1.0)


def test_masking_older_tokens_loses_no_reward() -> None:
    """The rewards of turns that do not train any more pass to the first token that does, so that the episode's sum, which its
    group is compared in, stays what it was; of an episode of which nothing is left, to nobody."""
    some = episode([1, 0, 1, 1], [0, NOT_SAMPLED, 1, 1], [0.5, 0.0, 0.25, 1.0])
    none = episode([1, 1], [0, 0], [0.5, 0.25])
    fresh = episode([1, 0, 1], [1, NOT_SAMPLED, 1], [0.5, 0.0, 0.25])
    unscored = episode([1, 1], [0, 1])
    group = Group(item=PromptItem(prompt_ids=(7,), ordinal=0), trajectories=[some, none, fresh, unscored])
    assert mask_older(group, 1) == 4
    assert some.response_mask == [0, 0, 1, 1] and some.rewards == [0.0, 0.0, 0.75, 1.0]
    assert none.rewards == [0.0, 0.0] and group.valid == [True, False, True, True]
    assert fresh.rewards == [0.5, 0.0, 0.25] and unscored.rewards is None


@pytest.mark.parametrize("rewards", [[float("nan"), 0.0], [0.0, float("inf")], [3e38, 3e38], [-1e39, 0.0]])
def test_rewards_that_are_no_finite_float32_are_no_episode(rewards: list[float]) -> None:
    """Nor such a sum of them: that is what its group is compared in."""
    episode([1, 1], rewards=[3e38, 0.0]).check()
    with pytest.raises(ValueError, match=r"rewards.*finite float32"):
        episode([1, 1], rewards=rewards).check()
    group = Group(item=PromptItem(prompt_ids=(7,), ordinal=3), trajectories=[episode([1, 1], rewards=rewards)])
    with pytest.raises(WorkflowError, match=r"prompt 3.*finite float32"):
        to_batch([group], pad_id=0)


def test_old_tokens_of_some_trajectories_leave_the_others() -> None:
    """A trajectory without a token left does not train and moves no baseline; the episode stays."""
    several = Episode(trajectories=[episode([1, 1], [0, 0]), episode([1, 0, 1], [0, NOT_SAMPLED, 3])])
    several.set_reward(2.0)
    group = Group(item=PromptItem(prompt_ids=(7,), ordinal=0), trajectories=[several, episode([1], [4], [1.0])])
    assert (group.first_version, group.num_tokens) == (0, 5)
    assert mask_older(group, 2) == 3
    assert group.valid == [True, True] and several.first_version == 3 and several.num_tokens == 1
    columns = dict(to_batch([group], pad_id=0).batch.items())
    assert columns["episode_id"].tolist() == [0, 0, 1] and columns["uid"].tolist() == [0, 0, 0]
    assert columns["response_mask"].sum(1).tolist() == [0, 1, 1] and columns["scores"].tolist() == [0.0, 2.0, 1.0]
    columns |= {"sample_index": torch.arange(3)}
    found = compute_advantages(columns, HERE, AlgorithmConfig(adv_estimator="rloo"), kl_coef=0.0, version=4)
    assert found.columns["advantages"].sum(1).tolist() == [0.0, 1.0, -1.0]
    assert mask_older(group, 4) == 1 and group.valid == [False, True]


@pytest.mark.parametrize(
    ("trajectories", "message"),
    [
        ([], "at least one trajectory"),
        ([episode([1]), episode([0, 0])], "trajectory 1 of the episode: the policy wrote none"),
        ([episode([1], rewards=[1.0]), episode([1])], "only some trajectories of the episode have rewards"),
    ],
)
def test_an_episode_that_cannot_train_is_refused(trajectories: list[Trajectory], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Episode(trajectories=trajectories).check()
