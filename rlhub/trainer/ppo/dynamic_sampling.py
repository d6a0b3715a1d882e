"""Dynamic sampling (Yu et al. 2025, arXiv 2503.14476, section 3.2): training batches of groups whose samples differ.

A group whose samples all have the same reward has no advantage to learn from.  Such groups are left out, and further prompts are
drawn in the loader's order until the batch is full of groups with signal.  What is decided here, where the paper leaves it
open:

- groups with signal beyond data.train_batch_size are dropped, and counted;
- after max_num_gen_batches generations the batch is filled up with groups without signal, with a warning: its size, and so
  the optimizer steps, stay what the configuration says, and such groups have no gradient in estimators that compare samples;
- a filter of the user's own (group_filter.py) may turn down further groups, or alone decides;
- the batch keeps the order of drawing, so groups that fill up are spread over the mini-batches;
- a sample without a valid score is not compared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhub.config.sections.ppo import PPOConfig
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.trainer.ppo.group_filter import GroupFilter, scored_groups
from rlhub.trainer.ppo.scoring import SIGNAL

logger = logging.getLogger(__name__)

PROMPT_AND_RESPONSE = ("input_ids", "attention_mask")


@dataclass(slots=True)
class _Drawn:
    """The groups of one step so far.  num_signal: all that have signal, also those that are dropped."""

    with_signal: list[Batch] = field(default_factory=list)
    without: list[Batch] = field(default_factory=list)
    num_generations: int = 0
    num_prompts: int = 0
    num_signal: int = 0
    reward_sum: float = 0.0
    num_valid: float = 0.0


@dataclass(slots=True)
class DynamicSampling:
    """The buffer that fills with groups with signal, generation by generation, and then is one training batch.

    own: the user's own filter.  metrics: sampling/* of the last batch.
    """

    config: PPOConfig
    own: GroupFilter | None = None
    metrics: dict[str, float] = field(init=False, default_factory=dict)
    _drawn: _Drawn = field(init=False, default_factory=_Drawn)

    def add(self, batch: Batch) -> Batch | None:
        """Takes the scored samples of one generation; returns the training batch once it is full or the bound is reached."""
        drawn, wanted, n = self._drawn, self.config.data.train_batch_size, self.config.actor_rollout_ref.rollout.n
        drawn.num_generations += 1
        drawn.reward_sum += batch.batch["scores"][batch.batch["valid"]].double().sum().item()
        drawn.num_valid += batch.batch["valid"].sum().item()
        signal = self._kept(batch, n)
        drawn.num_prompts += len(signal)
        missing = max(wanted - drawn.num_signal, 0)
        drawn.num_signal += int(signal.sum())
        drawn.with_signal.append(rows_of_groups(batch, signal.nonzero().squeeze(1)[:missing], n))
        filled = max(wanted - drawn.num_signal, 0)
        drawn.without.append(rows_of_groups(batch, (~signal).nonzero().squeeze(1)[:filled], n))
        if filled and drawn.num_generations < self.config.algorithm.filter_groups.max_num_gen_batches:
            return None
        return self._full_batch(filled)

    def _kept(self, batch: Batch, n: int) -> Tensor:
        """Returns (prompts,) bool: the groups that may train."""
        if self.config.algorithm.filter_groups.enable:
            kept = groups_with_signal(batch, n)
        else:
            kept = torch.ones(len(batch) // n, dtype=torch.bool)
        return kept if self.own is None else kept & torch.tensor([self.own(group) for group in scored_groups(batch, n)])

    def _full_batch(self, filled: int) -> Batch:
        """Returns the groups with signal and as many of the others as are missing, and begins anew."""
        drawn, self._drawn = self._drawn, _Drawn()
        if filled:
            self._warn(drawn, filled)
        self.metrics = {
            "sampling/num_gen_batches": float(drawn.num_generations),
            "sampling/num_prompts_generated": float(drawn.num_prompts),
            "sampling/share_filtered": 1 - drawn.num_signal / drawn.num_prompts,
            "sampling/num_dropped": float(max(drawn.num_signal - self.config.data.train_batch_size, 0)),
            "sampling/num_filled": float(filled),
            "sampling/reward_mean": drawn.reward_sum / max(drawn.num_valid, 1.0),
        }
        spare = join(drawn.without).slice(0, filled * self.config.actor_rollout_ref.rollout.n)
        return in_order_of_drawing(join([*drawn.with_signal, spare] if filled else drawn.with_signal))

    def _warn(self, drawn: _Drawn, filled: int) -> None:
        groups = self.config.algorithm.filter_groups
        logger.warning(
            "dynamic sampling: after %d generations (algorithm.filter_groups.max_num_gen_batches) %d of %d prompts have samples "
            "that %s; %d without signal fill the batch. The problems may be too easy or too hard for the policy: raise "
            "the bound or actor_rollout_ref.rollout.n, or change the data",
            drawn.num_generations, drawn.num_signal, self.config.data.train_batch_size,
            f"differ in {groups.metric}" if groups.enable else "algorithm.group_filter keeps", filled,
        )  # fmt: skip


def groups_with_signal(batch: Batch, n: int) -> Tensor:
    """Returns (prompts,) bool: at least two of a prompt's n neighbouring samples have a valid score and differ in it."""
    values: Tensor = batch.batch[SIGNAL].reshape(-1, n)
    valid = batch.batch["valid"].reshape(-1, n)
    high = values.masked_fill(~valid, -torch.inf).amax(1)
    low = values.masked_fill(~valid, torch.inf).amin(1)
    return high > low


def rows_of_groups(batch: Batch, groups: Tensor, n: int) -> Batch:
    """Returns all rows of those groups (their numbers within the batch), n rows each."""
    return batch.select_idxs((groups[:, None] * n + torch.arange(n)).flatten())


def in_order_of_drawing(batch: Batch) -> Batch:
    """Returns the batch with its rows by their prompt's ordinal, samples as they were; `uid` counts the prompts from 0 again."""
    batch.reorder(torch.argsort(batch.batch["ordinal"], stable=True))
    batch.batch["uid"] = torch.unique_consecutive(batch.batch["ordinal"], return_inverse=True)[1]
    return batch


def join(parts: Sequence[Batch]) -> Batch:
    """Returns the rows of all parts in order; prompts are padded on the left and responses on the right to the widest, except
    where they are by reference, without padding."""
    refs = [part for part in parts if isinstance(part, BatchRef)]
    if refs:
        return BatchRef.concat(refs)
    batches = [part for part in parts if isinstance(part, DataProto)]
    prompt = max(prompt_width(part) for part in batches)
    response = max(part.batch["responses"].shape[1] for part in batches)
    return DataProto.concat([widen(part, prompt, response) for part in batches])


def prompt_width(batch: DataProto) -> int:
    """Returns the number of columns of `input_ids` before the response."""
    return int(batch.batch["input_ids"].shape[1] - batch.batch["responses"].shape[1])


def widen(batch: DataProto, prompt: int, response: int) -> DataProto:
    """Returns the same rows with so wide a prompt and response; every two-dimensional column gains zeros outside the masks."""
    left, right = prompt - prompt_width(batch), response - batch.batch["responses"].shape[1]
    if left == 0 and right == 0:
        return batch
    tensors = {
        name: pad(column, (left if name in PROMPT_AND_RESPONSE else 0, right)) if column.dim() == 2 else column
        for name, column in batch.tensors().items()
    }
    return DataProto.from_dict(tensors, batch.non_tensor_batch, batch.meta_info)
