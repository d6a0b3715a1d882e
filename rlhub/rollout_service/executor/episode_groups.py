"""Prompts and their groups of episodes, the unit of admission, staleness and training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rlhub.agents.trajectory import Trajectory

StalePolicy = Literal["drop", "mask", "correct"]
"""The handling of a group with tokens older than the bound: it is dropped, trained without these tokens, or trained with the
rollout correction."""


@dataclass(slots=True, kw_only=True, frozen=True)
class PromptItem:
    """A prompt of the training data.  ordinal: its number in the run.  row: its other columns."""

    prompt_ids: tuple[int, ...]
    ordinal: int
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Group:
    """All samples of one prompt, finished.

    valid: whether each sample has a valid score.  numbers: the scorer's other numbers of each sample.  The scoring code sets
    both.  baseline: the greedy response to the prompt, which is scored but neither trained nor counted in the group's age; None
    if the advantage estimator uses none.
    """

    item: PromptItem
    trajectories: list[Trajectory]
    baseline: Trajectory | None = None
    valid: list[bool] = field(default_factory=list)
    numbers: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.valid = self.valid or [True] * len(self.trajectories)
        self.numbers = self.numbers or [{} for _ in self.trajectories]

    @property
    def ordinal(self) -> int:
        """Returns the number of the prompt in the run."""
        return self.item.ordinal

    @property
    def scored(self) -> list[Trajectory]:
        """Returns the trajectories that the reward function scores: the samples, and after them the baseline."""
        return [*self.trajectories, *([] if self.baseline is None else [self.baseline])]

    @property
    def first_version(self) -> int:
        """Returns the policy version of the oldest token that would train; the group's staleness counts from it."""
        return min(trajectory.first_version for trajectory in self.trajectories if any(trajectory.response_mask))

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that the policy wrote."""
        return sum(sum(trajectory.response_mask) for trajectory in self.trajectories)

    def to_json(self) -> dict[str, Any]:
        """Returns the group without its prompt, which a resumed run reads from the data again."""
        trajectories = [asdict(trajectory) for trajectory in self.trajectories]
        state = {"ordinal": self.ordinal, "trajectories": trajectories, "valid": self.valid, "numbers": self.numbers}
        return state if self.baseline is None else state | {"baseline": asdict(self.baseline)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any], item: PromptItem) -> Group:
        """Returns the group that `to_json` wrote, with the prompt of that ordinal."""
        trajectories = [Trajectory(**trajectory) for trajectory in state["trajectories"]]
        baseline = Trajectory(**state["baseline"]) if "baseline" in state else None
        valid, numbers = list(state["valid"]), list(state["numbers"])
        return cls(item=item, trajectories=trajectories, baseline=baseline, valid=valid, numbers=numbers)


def mask_older(group: Group, oldest: int) -> int:
    """Masks the tokens of versions before `oldest`; returns how many there were.

    A sample without any token left is not valid, so it does not train and does not change the baseline of the others.  Rewards of
    masked tokens move to the first token that is left, so that the sample is still compared by its whole reward.
    """
    masked = 0
    for sample, trajectory in enumerate(group.trajectories):
        mask = [
            int(used and version >= oldest) for used, version in zip(trajectory.response_mask, trajectory.versions, strict=True)
        ]
        masked += sum(trajectory.response_mask) - sum(mask)
        trajectory.response_mask = mask
        group.valid[sample] &= any(mask)
        if trajectory.rewards is not None:
            trajectory.rewards = moved_inside(trajectory.rewards, mask)
        if trajectory.added_rewards is not None:
            trajectory.added_rewards = moved_inside(trajectory.added_rewards, mask)
    return masked


def moved_inside(rewards: Sequence[float], mask: Sequence[int]) -> list[float]:
    """Returns the rewards (one per token) with those before the mask's first token added to that token; all 0 for an empty
    mask."""
    if not any(mask):
        return [0.0] * len(rewards)
    first = list(mask).index(1)
    return [0.0] * first + [sum(rewards[: first + 1]), *rewards[first + 1 :]]
