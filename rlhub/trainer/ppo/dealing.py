"""The rows of each optimizer step, and the rank that trains each of them.

`Dealing` fixes both from the numbers of rows, their lengths and the step alone.  A source that gets its rows from elsewhere asks
it for their order before they move, so that each row goes to the rank that trains it, once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhub.config.sections.ppo import PPOConfig
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.protocol.layout import ColumnInfo
from rlhub.single_controller import WorkerGroup
from rlhub.single_controller.worker_group import SourcesOf
from rlhub.trainer.ppo.metrics import row_lengths
from rlhub.trainer.ppo.requirements import num_mini_batches
from rlhub.utils.balance import partition, partition_groups


@dataclass(slots=True, kw_only=True, frozen=True)
class Dealing:
    """Fixes the mini-batches of a batch, and deals their rows to the ranks.

    num_ranks: each of that many parts of the batch has its share of every mini-batch, so that actor, critic and whatever else
    trains have, whatever their data-parallel sizes.  has_critic: mini-batches of the critic are fixed too.
    """

    config: PPOConfig
    num_ranks: int
    has_critic: bool = False

    @classmethod
    def between(cls, config: PPOConfig, actor: WorkerGroup, critic: WorkerGroup | None, shards: Iterable[int] = ()) -> Dealing:
        """Returns the dealing to the ranks of actor and critic, and to as many others as `shards` says."""
        critic_ranks = critic.mesh("critic").dp_size if critic is not None else 1
        num_ranks = math.lcm(actor.mesh("actor").dp_size, critic_ranks, *shards)
        return cls(config=config, num_ranks=num_ranks, has_critic=critic is not None)

    def __call__(self, batch: Batch, step: int) -> None:
        """Reorders the batch of a step in place, and adds its mini-batches; see `arrange`."""
        actor, num_samples = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
        critic_size = self.config.critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
        arrange(
            batch,
            rows_per_mini_batch=self._rows_per_mini_batch(batch),
            num_ranks=self.num_ranks,
            balance=self.config.trainer.balance_batch,
            whole_groups=actor.prefix_packing,
            shuffle_seed=self.config.trainer.seed * 1_000_003 + step if actor.shuffle else None,
            critic_rows_per_mini_batch=critic_size * num_samples if self.has_critic else None,
        )

    def order(self, small: DataProto, step: int) -> np.ndarray:
        """Returns the order (rows,) int64 of the rows in which part r of `chunk` is the one of rank r.

        small: prompt_length and response_length (rows,), and what tells samples of several rows apart, as the batch will have it.
        """
        rows = small.select([name for name in LENGTHS if name in small.batch.keys()], [], [])
        rows.batch["row"] = torch.arange(len(small))
        self(rows, step)
        return np.asarray(rows.batch["row"])

    def collect(
        self, ranks: WorkerGroup, small: DataProto, columns: dict[str, ColumnInfo], sources: SourcesOf, key: str, step: int
    ) -> BatchRef:
        """Lets the ranks get the rows of a step from where they are, each the rows that it will train; see `WorkerGroup.collect`.

        Returns them in the order of `small`: the step that deals them finds each where it belongs.
        """
        order = self.order(small, step)
        dealt = small.select_idxs(order)
        ref = ranks.collect(dealt, columns, lambda chosen: sources(order[chosen]), TRAINING_MESH, key)
        ref.reorder(torch.from_numpy(np.argsort(order)))
        return ref

    def begin_receive(self, ranks: WorkerGroup, batch: BatchRef, step: int) -> Callable[[], BatchRef]:
        """Lets other processes give away the rows of a step, each to the rank that will train it; see `WorkerGroup.receive`.

        Returns what lets the ranks get them, in the order of `batch`, which is dropped.
        """
        order = self.order(batch.small, step)
        batch.reorder(torch.from_numpy(order))
        get = ranks.begin_receive(batch, TRAINING_MESH)
        batch.drop()

        def received() -> BatchRef:
            moved = get()
            moved.reorder(torch.from_numpy(np.argsort(order)))
            return moved

        return received

    def _rows_per_mini_batch(self, batch: Batch) -> int:
        """Returns the rows of an optimizer step; of episodes, which have as many rows as calls, an equal part of the batch."""
        names = batch.names() if isinstance(batch, BatchRef) else batch.batch.keys()
        if "episode" in names:
            return -(-len(batch) // num_mini_batches(self.config))
        return self.config.actor_rollout_ref.actor.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n


TRAINING_MESH = "actor"
"""The arrangement of the ranks that train the policy."""

LENGTHS = ("prompt_length", "response_length", "episode_id", "episode", "uid")
"""Columns that decide where rows go."""


def arrange(
    batch: Batch,
    *,
    rows_per_mini_batch: int,
    num_ranks: int,
    balance: bool,
    whole_groups: bool = False,
    shuffle_seed: int | None = None,
    critic_rows_per_mini_batch: int | None = None,
) -> Batch:
    """Reorders `batch` in place so that part r of `chunk(num_ranks)` is what rank r should hold; adds column `mini_batch`
    and, where its size is given, `critic_mini_batch`.

    batch: needs `prompt_length` and `response_length` (rows,), or `attention_mask` (rows, prompt + response); `episode_id`
    (rows,), from 0, where samples have several rows or none, which count as one in the size of a mini-batch.  whole_groups: True
    keeps the rows of a `uid` on one rank where they fit, which needs `prompt_length`.  Returns it.
    """
    samples = batch.batch["episode_id"] if "episode_id" in batch.batch.keys() else torch.arange(len(batch))
    num_samples = int(samples.max()) + 1
    ids = mini_batch_ids(num_samples, rows_per_mini_batch, shuffle_seed)[samples]
    batch.batch["mini_batch"] = ids
    if critic_rows_per_mini_batch is not None:
        critic_ids = mini_batch_ids(num_samples, critic_rows_per_mini_batch, shuffle_seed)
        batch.batch["critic_mini_batch"] = critic_ids[samples]
    if num_ranks > 1:
        groups = batch.batch["uid"] if whole_groups else None
        lengths = row_lengths(batch) if groups is None else lengths_in_groups(batch, groups)
        batch.reorder(deal(lengths.tolist(), ids, num_ranks, balance=balance, groups=groups))
    return batch


def lengths_in_groups(batch: Batch, groups: Tensor) -> Tensor:
    """Returns the tokens of each row, (rows,) int64, of which the prompt's are counted once for all rows of its group."""
    _, group, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    prompts: Tensor = batch.batch["prompt_length"]
    lengths: Tensor = row_lengths(batch) - prompts + prompts // sizes[group]
    return lengths


def deal(lengths: Sequence[int], ids: Tensor, num_ranks: int, *, balance: bool, groups: Tensor | None = None) -> Tensor:
    """Returns the order of rows (rows,) in which part r of `chunk(num_ranks)` is what rank r should hold.

    lengths: tokens of each row.  ids: (rows,) the mini-batch of each, from 0.  groups: (rows,) the group of each, which stays on
    one rank where it fits; None deals every row alone.
    """
    tokens, owners = np.asarray(lengths), ids.numpy()
    members = [np.flatnonzero(owners == index) for index in range(int(owners.max()) + 1)]
    plan = capacities_of([len(rows) for rows in members], num_ranks)
    dealt, ranks, loads = [], [], np.zeros(num_ranks, dtype=np.int64)
    for rows, capacities in zip(members, plan, strict=True):
        costs = tokens[rows] if balance else np.ones(len(rows), dtype=np.int64)
        if groups is None:
            parts = partition(costs, num_ranks, capacities=capacities, loads=loads)
        else:
            parts = partition_groups(costs, groups[rows].tolist(), capacities, loads)
        chosen = np.fromiter(itertools.chain.from_iterable(parts), dtype=np.int64, count=len(rows))
        dealt.append(rows[chosen])
        ranks.append(np.repeat(np.arange(num_ranks), [len(part) for part in parts]))
        np.add.at(loads, ranks[-1], costs[chosen])
    order = np.argsort(np.concatenate(ranks), kind="stable")
    return torch.from_numpy(np.concatenate(dealt)[order])


def mini_batch_ids(num_samples: int, samples_per_mini_batch: int, shuffle_seed: int | None) -> Tensor:
    """Returns the optimizer step that each sample belongs to, (samples,) int64."""
    ids = torch.arange(num_samples) // samples_per_mini_batch
    if shuffle_seed is None:
        return ids
    return ids[torch.randperm(num_samples, generator=torch.Generator().manual_seed(shuffle_seed))]


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
