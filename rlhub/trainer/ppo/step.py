"""One training step, the same for every schedule: `TrainingStep.__call__` is the whole of it, in the order of the papers.

    publish the weights -> sample -> score -> log-probs (old, reference) and values -> advantages -> update critic -> update actor

What is computed follows from what the chosen algorithm requires (requirements.py), and where responses come from is the
business of a SampleSource: no algorithm, backend or environment is named here.  Calls of workers are timed where they are
dispatched; saving, validation and logging belong to the loop around the step (trainer.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.ppo import PPOConfig
from rlhub.protocol import DataProto
from rlhub.single_controller import WorkerGroup
from rlhub.trainer.ppo.advantages import AdvantageEstimation
from rlhub.trainer.ppo.correction import MismatchBound, correct_batch, measure_mismatch, mismatch_bound
from rlhub.trainer.ppo.metrics import mean_metrics, timing_per_token
from rlhub.trainer.ppo.mini_batches import arrange, number_samples, select_tokens
from rlhub.trainer.ppo.requirements import Requirements, requirements
from rlhub.trainer.ppo.scoring import Samples, Scorer, merge_scorings
from rlhub.utils.timing import PhaseTimer


class SampleSource(Protocol):
    """Where the samples of a step come from: the one thing in which schedules differ.

    policy_version: the number of training steps behind the policy's weights, 0 at the start.
    metrics: of the present step's sampling.
    """

    @property
    def policy_version(self) -> int: ...

    @property
    def metrics(self) -> dict[str, float]: ...

    def publish(self) -> None:
        """Whatever generates gets the policy's weights as `policy_version`; nothing is done where it has them already."""
        ...

    def sample(self, prompts: Iterator[DataProto], step: int) -> Samples:
        """Returns samples of further prompts for training step `step` (from 1).  prompts: endless, the same at each call."""
        ...

    def select(self, samples: Samples) -> DataProto | None:
        """Returns the training batch out of this step's scored samples, or None where further ones must be sampled."""
        ...

    def trained(self, step: int) -> None:
        """Step `step` is over: what was sampled for it is trained, and the policy is one version newer."""
        ...

    def save(self, folder: Path) -> list[FileEntry]:
        """Writes what is too much for `state` below a checkpoint's folder."""
        ...

    def state(self) -> dict[str, Any]:
        """Returns the position in the prompts ("loader") and what else must be remembered, JSON-able."""
        ...

    def load_state(self, state: Mapping[str, Any], folder: Path) -> None:
        """Goes on from `state` and what `save` wrote; called before anything else."""
        ...


@dataclass(slots=True, kw_only=True)
class TrainingStep:
    """Trains the policy (and the critic) once per call.  critic: None where the estimator requires no values."""

    config: PPOConfig
    source: SampleSource
    score: Scorer
    actor: WorkerGroup
    reference: WorkerGroup
    critic: WorkerGroup | None
    timers: PhaseTimer
    needs: Requirements = field(init=False)
    mismatch: MismatchBound = field(init=False)
    compute_advantages: AdvantageEstimation = field(init=False)

    def __post_init__(self) -> None:
        self.needs = requirements(self.config)
        self.mismatch = mismatch_bound(self.config)
        self.compute_advantages = AdvantageEstimation(self.config, self.needs, self.timers)

    def __call__(self, step: int, prompts: Iterator[DataProto]) -> dict[str, float]:
        """Takes training step `step` (from 1): version `step - 1` of the policy becomes version `step`.  Returns its metrics."""
        needs, source = self.needs, self.source

        # The trainer's weights go to whatever generates, and are checked there; before the first step they are version 0.
        source.publish()

        # Responses to further prompts, each scored once.  Dynamic sampling asks again until enough groups differ in reward.
        batch, scorings = None, []
        while batch is None:
            samples = source.sample(prompts, step)
            scorings.append(self.score(samples))
            batch = source.select(samples)
        metrics = source.metrics | merge_scorings(scorings)
        self.arrange(batch, step)

        # Log-probs of the policy before the update and of the reference, and values: submitted together, so that they run at
        # the same time on pools of their own.  In bypass the rollout's log-probs stand in for the policy's.
        passes = []
        if needs.old_log_probs:
            passes.append(self.actor.compute_log_prob.submit(log_prob_inputs(batch, needs)))
        elif needs.bypass:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        if needs.reference:
            passes.append(self.reference.compute_ref_log_prob.submit(model_inputs(batch)))
        if self.critic is not None:
            passes.append(self.critic.compute_values.submit(model_inputs(batch)))
        for sent in passes:
            output = sent.get()
            metrics |= mean_metrics(output.meta_info.pop("metrics", {}))
            batch.union(output)
        if needs.old_log_probs:
            metrics |= measure_mismatch(batch)
            self.mismatch.check(metrics)

        metrics |= self.compute_advantages(batch)

        # Both updates are submitted before one is waited for.  The critic learns from all tokens; the policy from those that
        # the rollout correction keeps, as soon as the critic has warmed up.
        updates = []
        if self.critic is not None:
            updates.append(self.critic.update_critic.submit(value_inputs(batch)))
        if step > self.config.trainer.critic_warmup:
            metrics |= correct_batch(batch, self.config.algorithm.rollout_correction)
            if needs.selection:
                batch.batch["selected"] = select_tokens(batch, self.config, step)
            updates.append(self.actor.update_actor.submit(policy_inputs(batch, needs)))
        for update in updates:
            metrics |= mean_metrics(update.get().meta_info["metrics"])
        if not needs.old_log_probs:  # without a pass of its own the update has measured the mismatch
            self.mismatch.check(metrics)
        return metrics | timing_per_token(self.timers.so_far(), batch)

    def arrange(self, batch: DataProto, step: int) -> None:
        """Fixes the mini-batches, and deals the rows to the ranks so that each rank of actor and critic has its part of each."""
        actor, num_samples = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
        critic_ranks = self.critic.mesh("critic").dp_size if self.critic is not None else 1
        number_samples(batch)
        arrange(
            batch,
            rows_per_mini_batch=actor.ppo_mini_batch_size * num_samples,
            num_ranks=math.lcm(self.actor.mesh("actor").dp_size, critic_ranks),
            balance=self.config.trainer.balance_batch,
            shuffle_seed=self.config.trainer.seed * 1_000_003 + step if actor.shuffle else None,
            critic_rows_per_mini_batch=(self.config.critic.ppo_mini_batch_size or actor.ppo_mini_batch_size) * num_samples
            if self.critic is not None
            else None,
        )


# The columns that each worker call reads: only these travel.

MODEL = ("input_ids", "attention_mask", "response_mask")
POLICY = (*MODEL, "mini_batch", "advantages", "old_log_probs", "ref_log_prob", "importance_weights", "selected", "staleness")
VALUE = (*MODEL, "critic_mini_batch", "values", "returns")


def view(batch: DataProto, names: tuple[str, ...], **meta: object) -> DataProto:
    """Returns the named columns of `batch` that exist, without copying, with `meta` as meta_info."""
    present = [name for name in names if name in batch.batch.keys()]
    selected = batch.select(batch_keys=present, non_tensor_batch_keys=[], meta_info_keys=[])
    selected.meta_info.update(meta)
    return selected


def model_inputs(batch: DataProto) -> DataProto:
    """Returns what a forward pass reads."""
    return view(batch, MODEL)


def log_prob_inputs(batch: DataProto, needs: Requirements) -> DataProto:
    """Returns what the policy's forward pass before the update reads; meta_info asks for sum_pi_squared where it is required."""
    return view(batch, MODEL, **({"sum_pi_squared": True} if needs.sum_pi_squared else {}))


def policy_inputs(batch: DataProto, needs: Requirements) -> DataProto:
    """Returns what the policy's update reads.  The rollout's log-probs go only where the update reads them or where the mismatch
    is measured in the update itself."""
    names: tuple[str, ...] = POLICY
    if needs.rollout_log_probs or "old_log_probs" not in batch.batch.keys():
        names = (*POLICY, "rollout_log_probs")
    return view(batch, names, num_mini_batches=count(batch, "mini_batch"))


def value_inputs(batch: DataProto) -> DataProto:
    """Returns what the critic's update reads."""
    selected = view(batch, VALUE, num_mini_batches=count(batch, "critic_mini_batch"))
    selected.batch["mini_batch"] = selected.batch.pop("critic_mini_batch")
    return selected


def count(batch: DataProto, column: str) -> int:
    """Returns the number of mini-batches that a column of their indices (from 0) tells apart."""
    return int(batch.batch[column].max().item()) + 1
