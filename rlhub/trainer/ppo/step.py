"""One training step, the same for every schedule: `TrainingStep.__call__` is the whole of it, in the order of the papers.

    publish the weights -> sample -> score -> log-probs (old, reference) and values -> advantages -> update critic -> update actor

What is computed follows from what the chosen algorithm requires (requirements.py), and where responses come from is the
business of a SampleSource: no algorithm, backend or environment is named here.  Calls of workers are timed where they are
dispatched; saving, validation and logging belong to the loop around the step (trainer.py).

The rows of each optimizer step are fixed by the order in which prompts were drawn (or a shuffle seeded by the step), never by
the number of ranks.  Within a mini-batch `arrange` deals them to the ranks by length, so that every rank has about the same
number of tokens, and reorders the batch until each rank's part is contiguous, which is what workers receive.

Some policy losses choose tokens from a whole mini-batch before it is cut over ranks and micro-batches.  That choice is a
function of the run's seed, the step and the samples alone: `select_tokens` puts rows in the order in which the samples were
drawn, and each token's random key belongs to its sample and position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlhub.algorithms.inputs import SelectionInputs
from rlhub.algorithms.registry import POLICY_LOSSES
from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.ppo import PPOConfig
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.registry import knobs_for
from rlhub.single_controller import WorkerGroup
from rlhub.trainer.ppo.advantages import (
    AdvantageEstimation,
    MismatchBound,
    correct_batch,
    measure_mismatch,
    mismatch_bound,
    old_log_probs,
)
from rlhub.trainer.ppo.metrics import mean_metrics, timing_per_token
from rlhub.trainer.ppo.requirements import Requirements, requirements
from rlhub.trainer.ppo.scoring import Samples, Scorer, add_scores
from rlhub.utils.balance import partition
from rlhub.utils.seeding import Purpose, uniforms
from rlhub.utils.timing import PhaseTimer


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

        # Responses to further prompts, each scored once; only a source that chooses by reward waits for the scores.  Dynamic
        # sampling asks again until enough groups differ in reward.
        batch, scorings = None, []
        while batch is None:
            samples = source.sample(prompts, step)
            scorings.append(self.score.submit(samples))
            batch = source.select(samples)
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
        if isinstance(batch, BatchRef):
            held, batch = batch, batch.fetch_all()
            held.drop()
        if needs.old_log_probs:
            metrics |= measure_mismatch(batch)
            self.mismatch.check(metrics)

        # The rewards were computed beside the passes.
        metrics |= add_scores(batch, scorings)
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

    def deal_rows(self, batch: Batch, step: int) -> Batch:
        """Fixes the mini-batches, and deals their rows to the ranks so that each rank of actor and critic has a part of each.

        Returns the batch: by reference, the rows are with their ranks now.
        """
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
# learn_mask those of the rows that train, loss_mask those of them that the policy's loss counts: none is ever written again.

TOKENS = ("input_ids", "attention_mask")
MODEL = (*TOKENS, "response_mask")
VALUE = (*TOKENS, "learn_mask", "critic_mini_batch", "values", "returns")
POLICY = (
    *(*TOKENS, "loss_mask", "mini_batch", "advantages"),
    *("old_log_probs", "ref_log_prob", "importance_weights", "selected", "staleness"),
)


def view(batch: Batch, names: tuple[str, ...], **meta: object) -> Batch:
    """Returns the named columns of `batch` that exist, without copying, with `meta` as meta_info."""
    known = batch.names() if isinstance(batch, BatchRef) else set(batch.batch.keys())
    present = [name for name in names if name in known]
    selected: Batch = batch.select(batch_keys=present, non_tensor_batch_keys=[], meta_info_keys=[])
    selected.meta_info.update(meta)
    return selected


def model_inputs(batch: Batch) -> Batch:
    """Returns what a forward pass reads."""
    return view(batch, MODEL)


def log_prob_inputs(batch: Batch, needs: Requirements) -> Batch:
    """Returns what the policy's forward pass before the update reads; meta_info asks for sum_pi_squared where it is required."""
    return view(batch, MODEL, **({"sum_pi_squared": True} if needs.sum_pi_squared else {}))


def policy_inputs(batch: Batch, needs: Requirements) -> Batch:
    """Returns what the policy's update reads.  The rollout's log-probs go only where the update reads them or where the mismatch
    is measured in the update itself."""
    names: tuple[str, ...] = POLICY
    if needs.rollout_log_probs or not needs.old_log_probs:
        names = (*POLICY, "rollout_log_probs")
    return view(batch, names, num_mini_batches=count(batch, "mini_batch"))


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


def arrange(
    batch: Batch,
    *,
    rows_per_mini_batch: int,
    num_ranks: int,
    balance: bool,
    shuffle_seed: int | None = None,
    critic_rows_per_mini_batch: int | None = None,
) -> Batch:
    """Reorders `batch` in place so that part r of `chunk(num_ranks)` is what rank r should hold; adds column `mini_batch`
    and, where its size is given, `critic_mini_batch`.

    batch: needs `prompt_length` and `response_length` (rows,), or `attention_mask` (rows, prompt + response).  Returns it.
    """
    ids = mini_batch_ids(len(batch), rows_per_mini_batch, shuffle_seed)
    batch.batch["mini_batch"] = ids
    if critic_rows_per_mini_batch is not None:
        batch.batch["critic_mini_batch"] = mini_batch_ids(len(batch), critic_rows_per_mini_batch, shuffle_seed)
    if num_ranks > 1:
        batch.reorder(deal(row_lengths(batch).tolist(), ids, num_ranks, balance=balance))
    return batch


def row_lengths(batch: Batch) -> Tensor:
    """Returns the tokens of prompt and response of each row, (rows,) int64."""
    columns = batch.batch
    if "prompt_length" not in columns.keys():
        return torch.as_tensor(columns["attention_mask"].sum(1))
    return torch.as_tensor(columns["prompt_length"] + columns["response_length"])


def deal(lengths: Sequence[int], ids: Tensor, num_ranks: int, *, balance: bool) -> Tensor:
    """Returns the order of rows (rows,) in which part r of `chunk(num_ranks)` is what rank r should hold.

    lengths: tokens of each row.  ids: (rows,) the mini-batch of each, from 0.
    """
    members = [(ids == index).nonzero().squeeze(1).tolist() for index in range(int(ids.max()) + 1)]
    plan = capacities_of([len(rows) for rows in members], num_ranks)
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for rows, capacities in zip(members, plan, strict=True):
        costs = [lengths[row] if balance else 1 for row in rows]
        for rank, chosen in enumerate(partition(costs, num_ranks, capacities=capacities, loads=loads)):
            parts[rank] += [rows[index] for index in chosen]
            loads[rank] += sum(costs[index] for index in chosen)
    return torch.tensor([row for part in parts for row in part])


def mini_batch_ids(num_rows: int, rows_per_mini_batch: int, shuffle_seed: int | None) -> Tensor:
    """Returns the optimizer step that each row belongs to, (rows,) int64."""
    ids = torch.arange(num_rows) // rows_per_mini_batch
    if shuffle_seed is None:
        return ids
    return ids[torch.randperm(num_rows, generator=torch.Generator().manual_seed(shuffle_seed))]


def capacities_of(mini_batch_sizes: list[int], num_ranks: int) -> list[list[int]]:
    """Returns the rows of each mini-batch on each rank: as even as possible, and summing over mini-batches to `part_sizes`."""
    targets = part_sizes(sum(mini_batch_sizes), num_ranks)
    plan = []
    for size in mini_batch_sizes:
        row = [size // num_ranks] * num_ranks
        plan.append(row)
        targets = [target - given for target, given in zip(targets, row, strict=True)]
    for row, size in zip(plan, mini_batch_sizes, strict=True):
        for _ in range(size % num_ranks):
            rank = max(range(num_ranks), key=lambda r: (targets[r], -r))
            row[rank] += 1
            targets[rank] -= 1
    return plan


def part_sizes(num_rows: int, num_parts: int) -> list[int]:
    """Returns the sizes of `DataProto.chunk`: they differ by at most one, larger ones first."""
    base, more = divmod(num_rows, num_parts)
    return [base + (part < more) for part in range(num_parts)]


def select_tokens(batch: DataProto, config: PPOConfig, step: int) -> Tensor:
    """Returns (rows, response), 1 on the tokens that the loss chose in each mini-batch; in the order of the batch's rows.

    batch: needs sample_index, mini_batch, old_log_probs, advantages and loss_mask.
    """
    actor, columns = config.actor_rollout_ref.actor, batch.batch
    name = actor.policy_loss.loss_mode
    select = POLICY_LOSSES.companion(name, "select")
    assert select is not None, f"{name} selects no tokens"
    kwargs, where = actor.policy_loss.kwargs, "actor_rollout_ref.actor.policy_loss.kwargs"
    knobs = knobs_for(POLICY_LOSSES.knobs_class(name), actor, kwargs, where=where)
    selected = torch.zeros(columns["loss_mask"].shape, dtype=torch.uint8)
    for mini_batch in columns["mini_batch"].unique():
        rows = (columns["mini_batch"] == mini_batch).nonzero().squeeze(1)
        rows = rows[columns["sample_index"][rows].argsort()]
        inputs = SelectionInputs(
            old_log_probs=old_log_probs(batch, bypass=config.algorithm.rollout_correction.bypass_mode)[rows],
            advantages=columns["advantages"][rows],
            response_mask=columns["loss_mask"][rows],
            keys=token_keys(config.trainer.seed, step, columns["sample_index"][rows].numpy(), selected.shape[1]),
        )
        selected[rows] = select(inputs, knobs).to(torch.uint8)
    return selected


def token_keys(seed: int, step: int, samples: np.ndarray, width: int) -> Tensor:
    """Returns (rows, width) float64 uniforms in [0, 1), a pure function of (seed, step, sample, position)."""
    keys = [uniforms(seed, Purpose.SELECTION, step, sample, count=width) for sample in samples.tolist()]
    return torch.from_numpy(np.array(keys).reshape(len(samples), width))
