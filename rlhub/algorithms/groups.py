"""Statistics of sample groups (the samples of one prompt), vectorised over all groups of a batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STD_EPS = 1e-6  # keeps the division finite; the published implementation of GRPO uses the same


@dataclass(slots=True, kw_only=True)
class GroupStatistics:
    """Holds per row its group's number (from 0), size, mean and unbiased standard deviation (0 for a singleton), and whether all
    its rewards are equal.  (batch,) each, float64.  The counts are over groups."""

    index: Tensor
    size: Tensor
    mean: Tensor
    std: Tensor
    equal: Tensor
    num_groups: int
    num_equal: int
    num_singleton: int

    @property
    def flat(self) -> Tensor:
        """Returns (batch,) bool: the row's group has no spread, being of one sample or of equal rewards."""
        return self.equal | (self.size == 1)

    def centred(self, rewards: Tensor) -> Tensor:
        """Returns R_i - mean_g, (batch,); exactly 0 where the group has no spread, NaN or not."""
        return (rewards - self.mean).masked_fill_(self.flat, 0.0)

    def normalized(self, rewards: Tensor, *, divide: bool = True) -> Tensor:
        """Returns (R_i - mean_g) / (std_g + 1e-6), (batch,), or the centred reward alone; exactly 0 where the group has no
        spread."""
        centred = self.centred(rewards)
        return self.divided(centred) if divide else centred

    def divided(self, values: Tensor) -> Tensor:
        """Returns values / (std_g + 1e-6), (batch,)."""
        return values / (self.std + STD_EPS)

    def total(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` (batch,) over each row's group, (batch,)."""
        return values.new_zeros(self.num_groups).index_add(0, self.index, values)[self.index]

    def top(self, values: Tensor) -> Tensor:
        """Returns the largest of `values` (batch,) in each row's group, (batch,)."""
        lowest = values.new_full((self.num_groups,), -torch.inf)
        return lowest.scatter_reduce(0, self.index, values, "amax")[self.index]

    def metrics(self) -> dict[str, float]:
        """Returns the shares of groups that carry no learning signal."""
        return {
            "groups/num": float(self.num_groups),
            "groups/all_equal": self.num_equal / max(self.num_groups, 1),
            "groups/singleton": self.num_singleton / max(self.num_groups, 1),
        }


def group_statistics(rewards: Tensor, group: Tensor) -> GroupStatistics:
    """Returns mean, spread and size of each row's group.

    rewards: (batch,) float64; group: (batch,) int64 ids, any values.  A group whose rewards are all equal is found by
    comparing its extremes, never by its rounded variance.
    """
    together = bool((group[1:] >= group[:-1]).all())  # as batches are made: nothing to sort
    find = torch.unique_consecutive if together else torch.unique
    ids, index, count = find(group, return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(ids), dtype=rewards.dtype, device=rewards.device)
    size = count.to(rewards.dtype)
    mean = (zeros.index_add(0, index, rewards) / size).index_select(0, index)
    squares = zeros.index_add(0, index, (rewards - mean).square())
    std = (squares / (size - 1).clamp(min=1)).sqrt()
    top = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    bottom = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    singleton = count == 1
    equal = (top == bottom) & ~singleton
    num_equal, num_singleton = torch.stack([equal, singleton]).sum(1).tolist()
    return GroupStatistics(
        index=index,
        size=size.index_select(0, index),
        mean=mean,
        std=std.index_select(0, index),
        equal=equal.index_select(0, index),
        num_groups=len(ids),
        num_equal=num_equal,
        num_singleton=num_singleton,
    )
