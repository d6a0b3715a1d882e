"""Mini-batches: which rows make which optimizer step, which rank holds them, and which of their tokens the loss chose.

Mini-batches are fixed by the order in which prompts were drawn (or a shuffle seeded by the step), never by the number of
ranks.  Within each mini-batch rows are dealt to the ranks by length, so that every rank has about the same number of tokens.
Workers receive contiguous parts, so the batch is reordered until each rank's part is contiguous.

Some policy losses choose tokens from a whole mini-batch, before it is cut over ranks and micro-batches.  That choice is a
function of the run's seed, the step and the samples alone: rows are put in the order in which the samples were drawn, and each
token's random key belongs to its sample and position.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rlhub.algorithms.inputs import SelectionInputs
from rlhub.algorithms.registry import POLICY_LOSSES
from rlhub.config.sections.ppo import PPOConfig
from rlhub.protocol import DataProto
from rlhub.registry import knobs_for
from rlhub.utils.balance import partition
from rlhub.utils.seeding import Purpose, uniforms


def part_sizes(num_rows: int, num_parts: int) -> list[int]:
    """Returns the sizes of `DataProto.chunk`: they differ by at most one, larger ones first."""
    base, more = divmod(num_rows, num_parts)
    return [base + (part < more) for part in range(num_parts)]


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


def arrange(
    batch: DataProto,
    *,
    rows_per_mini_batch: int,
    num_ranks: int,
    balance: bool,
    shuffle_seed: int | None = None,
    critic_rows_per_mini_batch: int | None = None,
) -> DataProto:
    """Reorders `batch` in place so that part r of `chunk(num_ranks)` is what rank r should hold; adds column `mini_batch`
    and, where its size is given, `critic_mini_batch`.

    batch: needs `attention_mask` (rows, prompt + response).  Returns the same batch.
    """
    ids = mini_batch_ids(len(batch), rows_per_mini_batch, shuffle_seed)
    batch.batch["mini_batch"] = ids
    if critic_rows_per_mini_batch is not None:
        batch.batch["critic_mini_batch"] = mini_batch_ids(len(batch), critic_rows_per_mini_batch, shuffle_seed)
    if num_ranks == 1:
        return batch
    lengths = batch.batch["attention_mask"].sum(1).tolist()
    members = [(ids == index).nonzero().squeeze(1).tolist() for index in range(int(ids.max()) + 1)]
    plan = capacities_of([len(rows) for rows in members], num_ranks)
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for rows, capacities in zip(members, plan, strict=True):
        costs = [lengths[row] if balance else 1 for row in rows]
        for rank, chosen in enumerate(partition(costs, num_ranks, capacities=capacities, loads=loads)):
            parts[rank] += [rows[index] for index in chosen]
            loads[rank] += sum(costs[index] for index in chosen)
    order = torch.tensor([row for part in parts for row in part])
    batch.reorder(order)
    return batch


def number_samples(batch: DataProto) -> None:
    """Adds `sample_index` (rows,) int64, the samples' numbers as they were drawn: before rows are dealt to the ranks."""
    batch.batch["sample_index"] = torch.arange(len(batch))


def select_tokens(batch: DataProto, config: PPOConfig, step: int) -> Tensor:
    """Returns (rows, response), 1 on the tokens that the loss chose in each mini-batch; in the order of the batch's rows.

    batch: needs sample_index, mini_batch, old_log_probs, advantages and response_mask as the update will read it.
    """
    actor, columns = config.actor_rollout_ref.actor, batch.batch
    name = actor.policy_loss.loss_mode
    select = POLICY_LOSSES.companion(name, "select")
    assert select is not None, f"{name} selects no tokens"
    kwargs, where = actor.policy_loss.kwargs, "actor_rollout_ref.actor.policy_loss.kwargs"
    knobs = knobs_for(POLICY_LOSSES.knobs_class(name), actor, kwargs, where=where)
    selected = torch.zeros(columns["response_mask"].shape, dtype=torch.uint8)
    for mini_batch in columns["mini_batch"].unique():
        rows = (columns["mini_batch"] == mini_batch).nonzero().squeeze(1)
        rows = rows[columns["sample_index"][rows].argsort()]
        inputs = SelectionInputs(
            old_log_probs=columns["old_log_probs"][rows],
            advantages=columns["advantages"][rows],
            response_mask=columns["response_mask"][rows],
            keys=token_keys(config.trainer.seed, step, columns["sample_index"][rows].numpy(), selected.shape[1]),
        )
        selected[rows] = select(inputs, knobs).to(torch.uint8)
    return selected


def token_keys(seed: int, step: int, samples: np.ndarray, width: int) -> Tensor:
    """Returns (rows, width) float64 uniforms in [0, 1), a pure function of (seed, step, sample, position)."""
    keys = [uniforms(seed, Purpose.SELECTION, step, sample, count=width) for sample in samples.tolist()]
    return torch.from_numpy(np.array(keys).reshape(len(samples), width))
