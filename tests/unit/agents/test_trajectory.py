"""An episode's reward and the tokens that it may stand on."""

from __future__ import annotations

import pytest

from rlhub.agents.trajectory import NOT_SAMPLED, Trajectory
from rlhub.agents.workflows.turns import Transcript
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
