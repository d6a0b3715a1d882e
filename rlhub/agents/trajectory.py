"""Trajectory: the tokens that one episode leaves for training.

Token in, token out: the tokens that the policy wrote are those that the engine sampled, never text that was tokenized again.
Tokens of tools, environments and templates stand between them with response_mask 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
LARGEST_SCORE = 3.4e38  # float32
NOT_SAMPLED = -1  # the version of a token that no policy wrote


def last_written(response_mask: Sequence[int]) -> int | None:
    """Returns the index of the last token that the policy wrote, or None if it wrote none."""
    return max((index for index, written in enumerate(response_mask) if written), default=None)


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """The tokens of one episode with their origin, log-probs and rewards.

    prompt_ids: the tokens that the first generation was conditioned on.  response_ids: all tokens after them, in order.

    response_mask, rollout_log_probs, versions: one entry per response token.  The mask is 1 for tokens that the policy wrote;
    their log-prob is that of the distribution sampled from, and their version is the policy version that sampled them.  For all
    other tokens the entries are 0, 0.0 and NOT_SAMPLED.

    rewards: one entry per response token, 0 where the mask is 0; the workflow sets them.  None: the run's reward function scores
    the response.

    added_rewards: one entry per response token, which is added to the configured reward; tools give them.  None: no such rewards.

    metrics: numbers of this episode (turns, tool calls, ...), averaged over the batch.

    text: the text in sample tables; where it is empty the response is decoded.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    rollout_log_probs: list[float]
    versions: list[int]
    finish_reason: FinishReason = "stop"
    rewards: list[float] | None = None
    added_rewards: list[float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    text: str = ""

    def check(self) -> None:
        """Raises ValueError if the columns do not fit together, or if no token can train."""
        length = len(self.response_ids)
        for name in ("response_mask", "rollout_log_probs", "versions", "rewards", "added_rewards"):
            column = getattr(self, name)
            if column is not None and len(column) != length:
                raise ValueError(f"{name} has {len(column)} entries for {length} response tokens")
        if not any(self.response_mask):
            raise ValueError("the policy wrote none of the response tokens: there is nothing to train on")
        if not self.finite_rewards:
            raise ValueError(f"its rewards add up to {sum(self.rewards or ())}, which with each of them must be a finite float32")

    @property
    def finite_rewards(self) -> bool:
        """Returns whether all rewards and their sum are finite in float32, the dtype of the reward columns."""
        return self.rewards is None or all(abs(reward) <= LARGEST_SCORE for reward in (*self.rewards, sum(self.rewards)))

    @property
    def first_version(self) -> int:
        """Returns the policy version of the first token that the policy wrote; staleness counts from it."""
        return self.versions[self.response_mask.index(1)]

    def set_reward(self, reward: float) -> None:
        """Sets the reward of the whole episode on the last token that the policy wrote.  An episode without such a token stays
        without a reward; `check` refuses it for training."""
        self.rewards = [0.0] * len(self.response_ids)
        last = last_written(self.response_mask)
        if last is not None:
            self.rewards[last] = reward
