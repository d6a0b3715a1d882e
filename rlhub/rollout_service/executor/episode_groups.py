"""Prompts and their groups of episodes, the unit of admission, staleness and training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rlhub.agents.partials import TrackedEngine, sample_state
from rlhub.agents.trajectory import Episode, Row, Sampled, Trajectory, TrajectoryRef, rows_of, sampled_of
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow
from rlhub.engines.rollout.base import Completion
from rlhub.utils.seeding import sample_seed

ATTEMPT = 3
"""Purpose that keeps the seeds of an episode's further attempts apart from those of its turns and answers."""
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

    trajectories: the results of its episodes, one each, also where an episode has several trajectories.

    valid: whether each sample has a valid score.  numbers: the scorer's other numbers of each sample.  The scoring code sets
    both.  baseline: the greedy response to the prompt, which is scored but neither trained nor counted in the group's age; None
    if the advantage estimator uses none.

    failed: the places, from 0, of episodes that failed for good.  They have neither trajectories nor rows: the samples that are
    left are compared with each other, and no loss, statistic or metric counts a failed one.
    """

    item: PromptItem
    trajectories: Sequence[Sampled]
    baseline: Sampled | None = None
    valid: list[bool] = field(default_factory=list)
    numbers: list[dict[str, float]] = field(default_factory=list)
    failed: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.valid = self.valid or [trajectory.num_tokens > 0 for trajectory in self.trajectories]
        self.numbers = self.numbers or [{} for _ in self.trajectories]

    @property
    def ordinal(self) -> int:
        """Returns the number of the prompt in the run."""
        return self.item.ordinal

    @property
    def places(self) -> list[int]:
        """Returns the place of each sample among the group's episodes, from 0; those of failed episodes are left out."""
        return [place for place in range(len(self.trajectories) + len(self.failed)) if place not in self.failed]

    @property
    def results(self) -> list[Sampled | None]:
        """Returns the result of each of the group's episodes, None for one that failed, and after them the baseline."""
        found = dict(zip(self.places, self.trajectories, strict=True))
        samples = [found.get(place) for place in range(len(self.trajectories) + len(self.failed))]
        return samples if self.baseline is None else [*samples, self.baseline]

    @property
    def scored(self) -> list[Sampled]:
        """Returns the trajectories that the reward function scores: the samples, and after them the baseline."""
        return [*self.trajectories, *([] if self.baseline is None else [self.baseline])]

    @property
    def rows(self) -> list[Row]:
        """Returns the rows of the batch that the samples become: of each, all of its trajectories."""
        return [row for sample in self.trajectories for row in rows_of(sample)]

    @property
    def counts(self) -> list[int]:
        """Returns the number of rows of each sample."""
        return [len(rows_of(sample)) for sample in self.trajectories]

    @property
    def row_counts(self) -> list[int]:
        """Returns the number of rows of each of the group's samples, 0 for one that failed."""
        found = dict(zip(self.places, self.counts, strict=True))
        return [found.get(place, 0) for place in range(len(self.trajectories) + len(self.failed))]

    @property
    def whole(self) -> list[Trajectory]:
        """Returns the rows, whose tokens must be here.  Raises ValueError where only their numbers are."""
        found = [row for row in self.rows if isinstance(row, Trajectory)]
        if len(found) < len(self.rows):
            raise ValueError(f"prompt {self.ordinal}: the tokens of its samples are in other processes")
        return found

    def lies_in(self, home: str) -> bool:
        """Returns whether that process has the tokens of one of the group's samples."""
        return any(lies_in(sample, home) for sample in self.scored)

    @property
    def first_version(self) -> int:
        """Returns the policy version of the oldest token that would train; the group's staleness counts from it."""
        return min(trajectory.first_version for trajectory in self.trajectories if trajectory.num_tokens)

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens that the policy wrote."""
        return sum(trajectory.num_tokens for trajectory in self.trajectories)

    def to_json(self) -> dict[str, Any]:
        """Returns the group without its prompt, which a resumed run reads from the data again."""
        trajectories = [asdict(trajectory) for trajectory in self.trajectories]
        state = {"ordinal": self.ordinal, "trajectories": trajectories, "valid": self.valid, "numbers": self.numbers}
        state["failed"] = list(self.failed)
        return state if self.baseline is None else state | {"baseline": asdict(self.baseline)}

    @classmethod
    def from_json(cls, state: Mapping[str, Any], item: PromptItem) -> Group:
        """Returns the group that `to_json` wrote, with the prompt of that ordinal."""
        trajectories = [sampled_of(trajectory) for trajectory in state["trajectories"]]
        baseline = sampled_of(state["baseline"]) if "baseline" in state else None
        valid, numbers, failed = list(state["valid"]), list(state["numbers"]), tuple(state.get("failed", ()))
        return cls(item=item, trajectories=trajectories, baseline=baseline, valid=valid, numbers=numbers, failed=failed)


@dataclass(slots=True)
class GroupInWork:
    """A group whose episodes run.  workflows: one per episode.  trajectories: of the episodes that have ended.  engines: one per
    episode, with the tokens written so far.  attempts: of each episode, how often it failed; with more failures than `retries` it
    has failed for good.  group: the complete group, while it is scored."""

    item: PromptItem
    workflows: Sequence[RolloutWorkflow]
    trajectories: list[Sampled | None]
    engines: list[TrackedEngine] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    retries: int = 0
    group: Group | None = None

    def __post_init__(self) -> None:
        self.attempts = self.attempts or [0] * len(self.trajectories)

    @property
    def missing(self) -> list[int]:
        """Returns the samples whose episodes have not ended."""
        pairs = enumerate(zip(self.trajectories, self.attempts, strict=True))
        return [sample for sample, (trajectory, failures) in pairs if trajectory is None and failures <= self.retries]

    @property
    def failed(self) -> list[int]:
        """Returns the samples whose episodes failed for good."""
        return [sample for sample, failures in enumerate(self.attempts) if failures > self.retries]

    def survives(self, group_size: int, min_samples: int) -> bool:
        """Returns whether enough samples are left to train, and the baseline after them, without which they have nothing to be
        compared with."""
        return not any(sample >= group_size for sample in self.failed) and len(self.failed) <= group_size - min_samples

    def complete(self, group_size: int) -> Group:
        """Returns the group of the samples that have ended well, while it is scored."""
        samples, baseline = self.trajectories[:group_size], self.trajectories[group_size:]
        self.group = Group(
            item=self.item,
            trajectories=[sample for sample in samples if sample is not None],
            baseline=baseline[0] if baseline else None,
            failed=tuple(self.failed),
        )
        return self.group

    def state(self) -> dict[str, Any]:
        """Returns the JSON-able state of all samples."""
        pairs = zip(self.trajectories, self.engines, self.attempts, strict=True)
        samples = [sample_state(trajectory, engine.written) | {"attempt": attempt} for trajectory, engine, attempt in pairs]
        return {"ordinal": self.item.ordinal, "samples": samples}


def episode_data(run_seed: int, item: PromptItem, sample: int, partial: Completion | None, attempt: int = 0) -> EpisodeData:
    """Returns what an episode of a prompt starts from.  attempt: how often it failed before; each attempt has its own seed."""
    seed = sample_seed(run_seed, item.ordinal, sample)
    return EpisodeData(
        prompt_ids=item.prompt_ids,
        ordinal=item.ordinal,
        sample=sample,
        seed=sample_seed(seed, attempt, ATTEMPT) if attempt else seed,
        row=item.row,
        partial=partial,
    )


async def episode(workflow: RolloutWorkflow, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
    """Runs one episode and checks that its trajectories can be trained on."""
    result = await workflow.arun_episode(engine, data)
    if isinstance(result, Trajectory | Episode):  # the process that keeps the tokens of others has checked them
        result.check()
    return result


def lies_in(sample: Sampled, home: str) -> bool:
    """Returns whether that process has tokens of this result."""
    return any(isinstance(row, TrajectoryRef) and row.home == home for row in rows_of(sample))


def mask_older(group: Group, oldest: int) -> int:
    """Masks the tokens of versions before `oldest`; returns how many there were.

    A sample without any token left is not valid, so it does not train and does not change the baseline of the others.
    """
    masked = 0
    for sample, trajectory in enumerate(group.trajectories):
        masked += trajectory.mask_older(oldest)
        group.valid[sample] &= trajectory.num_tokens > 0
    return masked
