"""One training step, the same for every schedule: `TrainingStep.__call__` is the whole of it, in the order of the papers.

    publish the weights -> sample -> score -> log-probs (old, reference) and values -> advantages -> update critic -> update actor

What is computed follows from what the chosen algorithm requires (requirements.py), and where responses come from is the
business of a SampleSource: no algorithm, backend or environment is named here.  Calls of workers are timed where they are
dispatched; saving, validation and logging belong to the loop around the step (trainer.py).

The rows of each optimizer step are fixed by the order in which prompts were drawn (or a shuffle seeded by the step), never by
the number of ranks.  A mini-batch has as many episodes as configured, with all of their rows.  Within it dealing.py deals rows to
the ranks by length, so that every rank has about the same number of tokens, and reorders the batch until each rank's part is
contiguous, which is what workers receive.

Work on token columns is done by workers, each on its rows: the driver reads one number a row.  `sample_index` numbers the samples
as they were drawn, so that what the ranks compute of the whole batch does not depend on how it was dealt.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from rlhub.algorithms.inputs import COMPONENT
from rlhub.algorithms.kl import KLController, build_kl_controller
from rlhub.checkpoint.files import FileEntry
from rlhub.config.rules.sources import algorithms_of
from rlhub.config.sections.ppo import PPOConfig
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.single_controller import WorkerGroup
from rlhub.trainer.ppo.dealing import Dealing
from rlhub.trainer.ppo.metrics import (
    MismatchBound,
    mean_metrics,
    mismatch_bound,
    row_lengths,
    source_metrics,
    timing_per_token,
)
from rlhub.trainer.ppo.requirements import Requirements, requirements
from rlhub.trainer.ppo.scoring import Samples, Scorer, Scoring, add_scores
from rlhub.utils.timing import PhaseTimer


@dataclass(slots=True, kw_only=True)
class StepParts(ABC):
    """The parts of a training step, and what is the same whether it is written as one function or as a graph.

    critic: None where the estimator requires no values.  sources: the data sources of which metrics are reported.  kl_controller:
    the coefficient of the KL in the reward, which moves from step to step.
    """

    config: PPOConfig
    source: SampleSource
    score: Scorer
    actor: WorkerGroup
    reference: WorkerGroup
    critic: WorkerGroup | None
    dealing: Dealing
    timers: PhaseTimer
    sources: Sequence[str] = ()
    needs: Requirements = field(init=False)
    mismatch: MismatchBound = field(init=False)
    kl_controller: KLController = field(init=False)

    def __post_init__(self) -> None:
        self.needs = requirements(self.config)
        self.mismatch = mismatch_bound(self.config)
        self.kl_controller = build_kl_controller(self.config.algorithm.kl_ctrl)

    @abstractmethod
    def __call__(self, step: int, prompts: Iterator[DataProto]) -> dict[str, float]:
        """Takes training step `step` (from 1): version `step - 1` of the policy becomes version `step`.  Returns its metrics."""

    def sample_and_score(self, prompts: Iterator[DataProto], step: int) -> tuple[Batch, list[Scoring]]:
        """Returns the samples of a step, in the order in which they were drawn, and their scores on the way.

        Each sample is scored once; only a source that chooses by reward waits for the scores.  Dynamic sampling asks again until
        enough groups differ in reward.
        """
        batch, scorings = None, []
        while batch is None:
            samples = self.source.sample(prompts, step)
            scorings.append(self.score.submit(samples))
            batch = self.source.select(samples)
        number_samples(batch)
        number_estimators(batch, list(algorithms_of(self.config)))
        if self.config.trainer.batches == "reference" and isinstance(batch, DataProto):
            batch.batch["prompt_length"] = row_lengths(batch) - batch.batch["response_length"]  # recordings of old lack it
        return batch, scorings

    def add_scores(self, batch: Batch, scorings: Sequence[Scoring]) -> dict[str, float]:
        """Waits for the scores of a step's samplings and adds them to the batch; returns their metrics, and the sources'."""
        return add_scores(batch, scorings) | source_metrics(batch, self.sources)

    def take_notice(self, metrics: Mapping[str, float], num_rows: int) -> None:
        """Compares what the advantages were made of with the bound of the mismatch, and moves the coefficient of the KL."""
        self.mismatch.check(metrics)
        if "actor/reward_kl_penalty" in metrics:
            self.kl_controller.update(metrics["actor/reward_kl_penalty"], num_rows)

    def end(self, batch: Batch) -> dict[str, float]:
        """Lets the ranks forget the columns of a trained batch; returns the phases' times per token."""
        if isinstance(batch, BatchRef):
            batch.drop()
        num_tokens, num_response_tokens = row_lengths(batch).sum().item(), batch.batch["response_length"].sum().item()
        return timing_per_token(self.timers.so_far(), num_tokens, num_response_tokens)

    def deal_rows(self, batch: Batch, step: int) -> Batch:
        """Fixes the mini-batches, and deals their rows to the ranks so that each rank that trains has a part of each.

        Returns the batch: by reference, the rows are with their ranks now.
        """
        self.dealing(batch, step)
        if self.config.trainer.batches == "driver":
            return batch
        if isinstance(batch, BatchRef):
            batch = self.actor.exchange(batch, "actor")
        else:
            batch = self.actor.place(batch, "actor", key=f"step-{step}")
        if self.needs.reference:
            self.reference.compute_ref_log_prob.bring(model_inputs(batch))
        if self.critic is not None:
            self.critic.compute_values.bring(model_inputs(batch))
        return batch


@dataclass(slots=True, kw_only=True)
class TrainingStep(StepParts):
    """Trains the policy (and the critic) once per call."""

    def __call__(self, step: int, prompts: Iterator[DataProto]) -> dict[str, float]:
        """Takes training step `step` (from 1): version `step - 1` of the policy becomes version `step`.  Returns its metrics."""
        needs, source = self.needs, self.source

        # The trainer's weights go to whatever generates, and are checked there; before the first step they are version 0.
        source.publish()

        # Responses to further prompts, whose rewards are computed from now on.
        batch, scorings = self.sample_and_score(prompts, step)
        metrics = dict(source.metrics)
        batch = self.deal_rows(batch, step)

        # Log-probs of the policy before the update and of the reference, and values: submitted together, so that they run at
        # the same time on pools of their own.  In bypass mode the update compares with the rollout's log-probs instead.
        passes = []
        if needs.old_log_probs:
            passes.append(self.actor.compute_log_prob.submit(log_prob_inputs(batch, needs)))
        if needs.reference:
            passes.append(self.reference.compute_ref_log_prob.submit(model_inputs(batch)))
        if self.critic is not None:
            passes.append(self.critic.compute_values.submit(model_inputs(batch)))
        metrics |= add_outputs(batch, passes)

        # The rewards were computed beside the passes.  Advantages come from the actor's ranks: each computes those of its own
        # rows, with statistics of the whole batch.
        metrics |= self.add_scores(batch, scorings)
        inputs = advantage_inputs(batch, needs, self.kl_controller.value)
        metrics |= add_outputs(batch, [self.actor.compute_advantages.submit(inputs)])
        self.take_notice(metrics, len(batch))

        # The policy's loss may weight, reject and choose tokens; the critic learns from all of them.
        trains_policy = step > self.config.trainer.critic_warmup
        if trains_policy:
            metrics |= self.choose_tokens(batch, step)

        # Both updates are submitted before one is waited for; the policy's as soon as the critic has warmed up.
        updates = []
        if self.critic is not None:
            updates.append(self.critic.update_critic.submit(value_inputs(batch)))
        if trains_policy:
            updates.append(self.actor.update_actor.submit(policy_inputs(batch, needs)))
        for update in updates:
            metrics |= mean_metrics(update.get().meta_info["metrics"])
        if not needs.old_log_probs:  # without a pass of its own the update has measured the mismatch
            self.mismatch.check(metrics)
        return metrics | self.end(batch)

    def choose_tokens(self, batch: Batch, step: int) -> dict[str, float]:
        """Adds loss_mask and importance_weights where tokens are weighted or rejected, selected where the policy's loss chooses
        some of them; returns the metrics."""
        metrics = {} if self.needs.staleness else {"mismatch/masked_share": 0.0}
        if self.needs.correction:
            metrics |= add_outputs(batch, [self.actor.rollout_correction.submit(view(batch, CORRECTION))])
        if self.needs.selection:
            add_outputs(batch, [self.actor.select_tokens.submit(view(batch, SELECTION, step=step))])
        return metrics


class SampleSource(Protocol):
    """Gives the samples of a step: the one thing in which schedules differ.

    policy_version: the number of training steps behind the policy's weights, 0 at the start.
    metrics: of the present step's sampling.
    """

    @property
    def policy_version(self) -> int: ...

    @property
    def metrics(self) -> dict[str, float]: ...

    def publish(self) -> None:
        """Sends the policy's weights to the rollout engines as `policy_version`; nothing is done where they have them already."""
        ...

    def sample(self, prompts: Iterator[DataProto], step: int) -> Samples:
        """Returns samples of further prompts for training step `step` (from 1).  prompts: endless, the same at each call."""
        ...

    def select(self, samples: Samples) -> Batch | None:
        """Returns the training batch out of this step's samples, or None where further ones must be sampled.  Their scores may be
        on their way; `samples.scored()` waits for them."""
        ...

    def trained(self, step: int) -> None:
        """Takes notice that step `step` is over: its samples are trained, and the policy is one version newer."""
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


def add_outputs(batch: Batch, passes: Sequence[Any]) -> dict[str, float]:
    """Waits for forward passes, adds the columns that they return to the batch, and returns their metrics."""
    metrics: dict[str, float] = {}
    for sent in passes:
        output = sent.get()
        metrics |= mean_metrics(output.meta_info.pop("metrics", {}))
        batch.union(output)
    return metrics


# The columns that each worker call reads: only these travel.  response_mask are the tokens of the model as they were generated,
# learn_mask those of the rows that train, loss_mask those of them that the policy's loss counts, where a correction has rejected
# some: none is ever written again.

TOKENS = ("input_ids", "attention_mask")
MODEL = (*TOKENS, "pixel_values", "images", "response_mask")
REWARD = (
    *("valid", "scores", "configured_scores", "token_level_scores", "given_rewards", "added_rewards"),
    *("finish_reason", "baseline_rewards"),
)
ADVANTAGE = (
    *("sample_index", "uid", "episode_id", "estimator", "prompt_length", "response_length", "response_mask"),
    *("values", "old_log_probs", "ref_log_prob", "sum_pi_squared"),
    *("episode", "call", "terminated", "next_values"),
)
VALUE = (*TOKENS, "learn_mask", "critic_mini_batch", "values", "returns")
ESTIMATED = ("advantages", "returns", "learn_mask")
CORRECTION = ("sample_index", "learn_mask", "advantages", "old_log_probs", "rollout_log_probs")
SELECTION = ("sample_index", "mini_batch", "learn_mask", "loss_mask", "advantages", "old_log_probs", "rollout_log_probs")
POLICY = (
    *(*TOKENS, "pixel_values", "images", "routed_experts", "mini_batch", "advantages"),
    *("old_log_probs", "ref_log_prob", "importance_weights", "selected"),
)


def view(batch: Batch, names: tuple[str, ...], **meta: object) -> Batch:
    """Returns the named columns of `batch` that exist, without copying, with `meta` as meta_info."""
    present = [name for name in names if name in names_of(batch)]
    selected: Batch = batch.select(batch_keys=present, non_tensor_batch_keys=[], meta_info_keys=[])
    selected.meta_info.update(meta)
    return selected


def names_of(batch: Batch) -> set[str]:
    """Returns the names of the tensor columns that a worker can read."""
    return batch.names() if isinstance(batch, BatchRef) else set(batch.batch.keys())


def model_inputs(batch: Batch) -> Batch:
    """Returns what a forward pass reads."""
    return view(batch, MODEL)


def log_prob_inputs(batch: Batch, needs: Requirements) -> Batch:
    """Returns what the policy's forward pass before the update reads; meta_info asks for sum_pi_squared and values where they are
    required."""
    asked = {"sum_pi_squared": needs.sum_pi_squared, "values": needs.own_values}
    return view(batch, (*MODEL, "routed_experts"), **{name: True for name, wanted in asked.items() if wanted})


def advantage_inputs(batch: Batch, needs: Requirements, kl_coef: float, more: Sequence[str] = ()) -> Batch:
    """Returns what the advantages are made of, and with log-probs of the policy those of the rollout, from which the mismatch is
    measured.  more: further columns."""
    present = names_of(batch)
    names = [*ADVANTAGE, *REWARD, *more, *sorted(name for name in present if name.startswith(COMPONENT))]
    if "prompt_length" not in present:
        names.append("attention_mask")
    if needs.old_log_probs or needs.bypass:
        names += ["rollout_log_probs", "policy_version"]
    return view(batch, tuple(names), kl_coef=kl_coef, policy_version=batch.meta_info.get("policy_version"))


def policy_inputs(batch: Batch, needs: Requirements) -> Batch:
    """Returns what the policy's update reads.  The rollout's log-probs go only where the update reads them or where the mismatch
    is measured in the update itself."""
    names = [*POLICY, "loss_mask" if "loss_mask" in names_of(batch) else "learn_mask"]
    if needs.rollout_log_probs or not needs.old_log_probs:
        names.append("rollout_log_probs")
    names += ["values", "returns"] if needs.own_values else []
    meta: dict[str, object] = {"num_mini_batches": count(batch, "mini_batch")}
    if needs.staleness:
        names.append("policy_version")
        meta["policy_version"] = batch.meta_info.get("policy_version")
    return view(batch, tuple(names), **meta)


def value_inputs(batch: Batch) -> Batch:
    """Returns what the critic's update reads."""
    selected = view(batch, VALUE, num_mini_batches=count(batch, "critic_mini_batch"))
    selected.batch["mini_batch"] = selected.batch.pop("critic_mini_batch")
    return selected


def count(batch: Batch, column: str) -> int:
    """Returns the number of mini-batches that a column of their indices (from 0) tells apart."""
    return int(batch.batch[column].max().item()) + 1


def number_samples(batch: Batch) -> None:
    """Adds `sample_index` (rows,) int64, the samples' numbers as they were drawn: before rows are dealt to the ranks."""
    batch.batch["sample_index"] = torch.arange(len(batch))


def number_estimators(batch: Batch, sources: Sequence[str]) -> None:
    """Adds `estimator` (rows,) int64, where data sources have estimators of their own: the place of the row's source among these,
    from 1, and 0 for the rows of others."""
    if sources:
        numbers = {name: number for number, name in enumerate(sources, 1)}
        batch.batch["estimator"] = torch.tensor([numbers.get(name, 0) for name in batch.non_tensor_batch["data_source"]])
