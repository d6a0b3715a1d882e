"""Trajectory: the tokens of one conversation for training; TrajectoryRef: its numbers, where the tokens stay in the process that
ran the episode; Episode: an episode with several of them.

Token in, token out: the tokens that the policy wrote are those that the engine sampled, never text that was tokenized again.
Tokens of tools, environments and templates stand between them with response_mask 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort"]
LARGEST_SCORE = 3.4e38  # float32
NOT_SAMPLED = -1  # the version of a token that no policy wrote


def last_written(response_mask: Sequence[int]) -> int | None:
    """Returns the index of the last token that the policy wrote, or None if it wrote none."""
    return max((index for index, written in enumerate(response_mask) if written), default=None)


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """The tokens of one episode, or of one conversation of it, with their origin, log-probs and rewards.

    prompt_ids: the tokens that the first generation was conditioned on.  response_ids: all tokens after them, in order.

    response_mask, rollout_log_probs, versions: one entry per response token.  The mask is 1 for tokens that the policy wrote;
    their log-prob is that of the distribution sampled from, and their version is the policy version that sampled them.  For all
    other tokens the entries are 0, 0.0 and NOT_SAMPLED.

    rewards: one entry per response token, 0 where the mask is 0; the workflow sets them.  None: the run's reward function scores
    the response.

    added_rewards: one entry per response token, which is added to the configured reward; tools give them.  None: no such rewards.

    metrics: numbers of this episode (turns, tool calls, ...), averaged over the batch.

    comparison: the name of what its reward belongs to, where an episode has several rewards: group statistics compare the rows
    of a prompt with the same name.  "" for a reward of the whole episode.

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
    comparison: str = ""
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

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that the policy wrote."""
        return sum(self.response_mask)

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_ids)

    @property
    def response_length(self) -> int:
        return len(self.response_ids)

    def mask_older(self, oldest: int) -> int:
        """Masks the tokens of versions before `oldest`; returns how many there were.

        Rewards of masked tokens move to the first token that is left, so that the sample is still compared by its whole reward.
        """
        before = self.num_tokens
        self.response_mask = [
            int(used and version >= oldest) for used, version in zip(self.response_mask, self.versions, strict=True)
        ]
        if self.rewards is not None:
            self.rewards = moved_inside(self.rewards, self.response_mask)
        if self.added_rewards is not None:
            self.added_rewards = moved_inside(self.added_rewards, self.response_mask)
        return before - self.num_tokens

    def set_reward(self, reward: float) -> None:
        """Sets the reward of the whole episode on the last token that the policy wrote.  An episode without such a token stays
        without a reward; `check` refuses it for training."""
        self.rewards = [0.0] * len(self.response_ids)
        last = last_written(self.response_mask)
        if last is not None:
            self.rewards[last] = reward


@dataclass(slots=True, kw_only=True)
class TrajectoryRef:
    """The numbers of a Trajectory whose tokens stay in the ColumnStore of the process that ran its episode.

    home: that process.  key: the batch in its store, of one row.  prompt_length, response_length: in tokens.  runs: the policy's
    versions in the order of its tokens, each with the number of tokens that it wrote in a row.  oldest: tokens of versions
    before it are masked when the row is read.

    rewards, added_rewards: the sums of those of the Trajectory, a list of one number; None where it has none.  late_reward: a
    reward for the last token that came after the episode; None if the rewards are its own.

    The other fields are those of Trajectory.
    """

    home: str
    key: str
    prompt_length: int
    response_length: int
    runs: list[tuple[int, int]]
    finish_reason: FinishReason = "stop"
    rewards: list[float] | None = None
    added_rewards: list[float] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    oldest: int = NOT_SAMPLED
    late_reward: float | None = None
    comparison: str = ""

    @classmethod
    def of(cls, trajectory: Trajectory, home: str, key: str) -> TrajectoryRef:
        """Returns the numbers of this trajectory."""
        written = [version for version, mask in zip(trajectory.versions, trajectory.response_mask, strict=True) if mask]
        added = trajectory.added_rewards
        return cls(
            home=home,
            key=key,
            prompt_length=len(trajectory.prompt_ids),
            response_length=len(trajectory.response_ids),
            runs=[(version, len(list(run))) for version, run in groupby(written)],
            finish_reason=trajectory.finish_reason,
            rewards=None if trajectory.rewards is None else [float(sum(trajectory.rewards))],
            added_rewards=None if added is None else [float(sum(added))],
            metrics=trajectory.metrics,
            comparison=trajectory.comparison,
        )

    @property
    def first_version(self) -> int:
        """Returns the policy version of the first token that the policy wrote; staleness counts from it."""
        return self.runs[0][0]

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that the policy wrote."""
        return sum(count for _, count in self.runs)

    def mask_older(self, oldest: int) -> int:
        """Masks the tokens of versions before `oldest`; returns how many there were."""
        before = self.num_tokens
        self.oldest = max(self.oldest, oldest)
        self.runs = [(version, count) for version, count in self.runs if version >= oldest]
        return before - self.num_tokens

    def set_reward(self, reward: float) -> None:
        """Sets the reward of the whole episode."""
        self.rewards, self.late_reward = [reward], reward


Row = Trajectory | TrajectoryRef
"""A row of a training batch, with its tokens or without."""


@dataclass(slots=True, kw_only=True)
class Episode:
    """An episode of several conversations: sub-agents, parallel conversations, histories that the agent has changed.

    trajectories: at least one; each becomes a row of the batch.  Rows may begin with the same tokens, as the branches of a
    conversation do: the mask of one of them contains an answer that they share, and the others mask it out, so that every token
    trains once.  The run's reward function scores the response of the last one.

    metrics: numbers of the whole episode, averaged over the episodes of a batch; those of its trajectories do not count.

    All trajectories have rewards, or none has.  With one reward for the whole episode, each has that reward (`set_reward`), and
    group statistics count it once.  Trajectories with rewards of their own name what these belong to in `comparison`.
    """

    trajectories: Sequence[Row]
    metrics: dict[str, float] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ValueError if a trajectory cannot train, or if only some have rewards."""
        if not self.trajectories:
            raise ValueError("an episode needs at least one trajectory")
        for number, row in enumerate(self.trajectories):
            try:
                if isinstance(row, Trajectory):
                    row.check()
            except ValueError as error:
                raise ValueError(f"trajectory {number} of the episode: {error}") from None
        if len({row.rewards is None for row in self.trajectories}) > 1:
            raise ValueError("only some trajectories of the episode have rewards; set one on each, or call set_reward")

    @property
    def answer(self) -> Row:
        """Returns the trajectory whose response the run's reward function scores."""
        return self.trajectories[-1]

    @property
    def rewards(self) -> list[float] | None:
        """Returns the rewards of the answer; None if the run's reward function scores it."""
        return self.answer.rewards

    @property
    def first_version(self) -> int:
        """Returns the policy version of the oldest token that would train; staleness counts from it."""
        return min(row.first_version for row in self.trajectories if row.num_tokens)

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that the policy wrote."""
        return sum(row.num_tokens for row in self.trajectories)

    def mask_older(self, oldest: int) -> int:
        """Masks the tokens of versions before `oldest`; returns how many there were."""
        return sum(row.mask_older(oldest) for row in self.trajectories)

    def set_reward(self, reward: float) -> None:
        """Sets the reward of the whole episode."""
        for row in self.trajectories:
            row.set_reward(reward)


Sampled = Row | Episode
"""An episode's result, with its tokens or without."""


def rows_of(sample: Sampled) -> Sequence[Row]:
    """Returns the rows of the batch that this result becomes."""
    return sample.trajectories if isinstance(sample, Episode) else (sample,)


def answer_of(sample: Sampled) -> Row:
    """Returns the row whose response the run's reward function scores."""
    return sample.answer if isinstance(sample, Episode) else sample


def with_rows(sample: Sampled, rows: Sequence[Row]) -> Sampled:
    """Returns the same result with other rows in place of its own."""
    return replace(sample, trajectories=rows) if isinstance(sample, Episode) else rows[0]


def sampled_of(state: Mapping[str, Any]) -> Sampled:
    """Returns the result of a JSON mapping; the inverse of `dataclasses.asdict`."""
    if "trajectories" in state:
        rows = [row_of(row) for row in state["trajectories"]]
        return Episode(trajectories=rows, metrics=state["metrics"])
    return row_of(state)


def row_of(state: Mapping[str, Any]) -> Row:
    """Returns the row of a JSON mapping; the inverse of `dataclasses.asdict`."""
    if "key" not in state:
        return Trajectory(**state)
    return TrajectoryRef(**{**state, "runs": [(version, count) for version, count in state["runs"]]})


def moved_inside(rewards: Sequence[float], mask: Sequence[int]) -> list[float]:
    """Returns the rewards (one per token) with those before the mask's first token added to that token; all 0 for an empty
    mask."""
    if not any(mask):
        return [0.0] * len(rewards)
    first = list(mask).index(1)
    return [0.0] * first + [sum(rewards[: first + 1]), *rewards[first + 1 :]]
