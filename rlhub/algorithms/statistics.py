"""Statistics of sample groups (the samples of one prompt), vectorised over all groups, and of the whole training batch.

A mean, a spread or an extreme of the batch is made in two parts.  A pure function of a row gives a few float64 numbers
(`row_moments`, `row_sums`), and these are added in the order of the rows (`pairwise_sum`, `batch_moments`).  So every rank
computes the numbers of its own rows, and a `Gather` puts those of all ranks in sampled order: the statistic is the same in every
bit however the rows were cut.  Sums that each rank adds up itself are not: floating-point addition is not associative.

For the same reason the order of additions is fixed here and not left to a kernel, whose order depends on the number of rows,
threads and columns: neighbours are added, then neighbouring pairs, and so on.  Padding to the right changes no bit of that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.algorithms.masked import masked

STD_EPS = 1e-6  # keeps the division finite; the published implementation of GRPO uses the same


Collect = Callable[[Tensor], Tensor]
"""Returns the rows of every process one after the other, given this one's: (own, ...) -> (all, ...).  Of tensors of tokens the
narrower ones are padded with zeros on the right.  Every process calls it."""


@dataclass(slots=True, frozen=True, eq=False)
class Gather:
    """Brings numbers of each row together; every process that has rows of the batch calls it, in the same order.

    order: (all,) int64, the places of the samples among the collected rows, in sampled order; None where rows are so already.
    places: (own,) int64, the place of each own row in sampled order; None where `order` is.
    collect: None in a process that has all rows.
    """

    order: Tensor | None = None
    places: Tensor | None = None
    collect: Collect | None = None

    @classmethod
    def of(cls, sample_index: Tensor, collect: Collect | None = None) -> Gather:
        """Returns the gather of a batch of which this process has the rows `sample_index`, (own,) int64."""
        every = sample_index if collect is None else collect(sample_index)
        order = every.argsort()
        return cls(order, torch.searchsorted(every[order], sample_index), collect)

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns the numbers of all rows in sampled order, (all, ...).  rows: (own,) or (own, numbers)."""
        every = rows if self.collect is None else self.collect(rows)
        return every if self.order is None else every[self.order]

    def each(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what a call with each of these columns does, in one exchange.  columns: float64 or int64."""
        if self.collect is None:
            return {name: self(column) for name, column in columns.items()}
        wide = [column if column.dim() > 1 else column[:, None] for column in columns.values()]
        every = self(torch.cat([column.contiguous().view(torch.int64) for column in wide], 1))
        parts = torch.split(every, [column.shape[1] for column in wide], 1)
        return {
            name: part.contiguous().view(column.dtype).reshape(-1, *column.shape[1:])
            for (name, column), part in zip(columns.items(), parts, strict=True)
        }

    def own(self, rows: Tensor) -> Tensor:
        """Returns this process's rows of numbers of all rows in sampled order: (all, ...) -> (own, ...)."""
        return rows if self.places is None else rows[self.places]


HERE = Gather()
"""The gather of a process that has the whole batch in sampled order."""


@dataclass(slots=True, frozen=True, eq=False)
class EpisodeRows:
    """Says which rows of the whole batch, in sampled order, are one episode in the eyes of a group.

    index: (rows,) int64, the number of each row's episode, from 0 in the order of their first rows; None where every row is an
    episode.
    """

    index: Tensor | None = None

    @classmethod
    def of(cls, group: Tensor, episode_id: Tensor) -> EpisodeRows:
        """Returns the rows by episode.  group, episode_id: (rows,) int64; rows of an episode in two groups count once in each."""
        known, index = torch.unique(torch.stack([group, episode_id], 1), dim=0, return_inverse=True)
        if len(known) == len(group):
            return cls()
        first = _firsts(index, len(known))
        return cls(first.argsort().argsort()[index])

    def firsts(self, values: Tensor) -> Tensor:
        """Returns the value of each episode's first row: (rows,) -> (episodes,)."""
        return values if self.index is None else values[_firsts(self.index, self._num)]

    def totals(self, values: Tensor) -> Tensor:
        """Returns the sum over each episode's rows: (rows,) -> (episodes,)."""
        return values if self.index is None else values.new_zeros(self._num).index_add(0, self.index, values)

    def means(self, values: Tensor) -> Tensor:
        """Returns the mean over each episode's rows, exactly their value where it is the same in all: (rows,) -> (episodes,)."""
        if self.index is None:
            return values
        first = self.firsts(values)
        rest = torch.where(values == first[self.index], torch.zeros_like(values), values - first[self.index])
        return first + self.totals(rest) / self.totals(torch.ones_like(values))

    def each(self, episodes: Tensor) -> Tensor:
        """Returns the value of its episode for each row: (episodes,) -> (rows,)."""
        return episodes if self.index is None else episodes[self.index]

    @property
    def leading(self) -> Tensor:
        """Returns whether each row is the first of its episode, (rows,) bool, where `index` is given."""
        assert self.index is not None, "else all rows are"
        leading = torch.zeros(len(self.index), dtype=torch.bool)
        leading[_firsts(self.index, self._num)] = True
        return leading

    @property
    def _num(self) -> int:
        return 0 if self.index is None or not len(self.index) else int(self.index.max()) + 1


def _firsts(index: Tensor, count: int) -> Tensor:
    """Returns the first place of each of the numbers 0 to count - 1 in `index`."""
    rows = torch.arange(len(index), device=index.device)
    return rows.new_full((count,), len(index)).scatter_reduce(0, index, rows, "amin")


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


VARIANCE_EPS = 1e-8
COUNT, SUM, SQUARES, LOWEST, HIGHEST = range(5)
"""Columns of `row_moments`."""


def pairwise_sum(values: Tensor) -> Tensor:
    """Returns the sum over the last dimension in float64; 0 without any.  Zeros behind the last value change no bit of it."""
    sums = values.double()
    while (length := sums.shape[-1]) > 1:
        pairs = sums[..., 0 : length - 1 : 2] + sums[..., 1::2]
        sums = torch.cat([pairs, sums[..., -1:]], -1) if length % 2 else pairs
    return sums.sum(-1) + 0.0  # of one number: no order; and the sign of a zero is gone


def row_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Returns sum_t x_{i,t} m_{i,t}, (rows,) float64.  values, mask: (rows, tokens)."""
    return pairwise_sum(masked(values.detach(), mask))


def masked_total(values: Tensor, mask: Tensor, gather: Gather = HERE) -> Tensor:
    """Returns the sum over the mask as `row_sums` added in the order of the rows; scalar float64."""
    return pairwise_sum(gather(row_sums(values, mask)))


def row_moments(values: Tensor, mask: Tensor) -> Tensor:
    """Returns count, sum, squared deviations from the row's own mean, lowest and highest of each row, (rows, 5) float64.

    values, mask: (rows, tokens) or (rows,).  A row without a value in the mask has (0, 0, 0, inf, -inf).  Deviations from the
    row's own mean lose nothing where values are large and nearly equal, as squares do.
    """
    if mask.dim() == 2 and not mask.shape[1]:
        values, mask = values.new_zeros(len(mask)), mask.new_zeros(len(mask))
    keep = mask.bool() if mask.dim() == 2 else mask.bool()[:, None]
    wide = values.detach().double().reshape(keep.shape)
    inside = masked(wide, keep)
    count, total = pairwise_sum(keep), pairwise_sum(inside)
    deviations = masked(inside - (total / count.clamp(min=1))[:, None], keep)
    lowest, highest = (torch.where(keep, wide, end) for end in (torch.inf, -torch.inf))
    return torch.stack([count, total, pairwise_sum(deviations.square()), lowest.amin(1), highest.amax(1)], 1)


@dataclass(slots=True, kw_only=True)
class Moments:
    """The moments of all values of a batch, float64 scalars.  squares: the sum of squared deviations from the mean.  Where there
    is no value, lowest is inf, highest -inf and all others are 0."""

    count: Tensor
    total: Tensor
    mean: Tensor
    squares: Tensor
    lowest: Tensor
    highest: Tensor


def batch_moments(rows: Tensor) -> Moments:
    """Returns the moments of the batch out of `row_moments` in the order of its rows, (rows, 5).

    squares = sum_i squares_i + sum_i n_i (mean_i - mean)^2 (Chan et al. 1979, "Updating formulae and a pairwise algorithm for
    computing sample variances").
    """
    count, total, within = pairwise_sum(rows[:, : SQUARES + 1].t())
    mean = total / count.clamp(min=1)
    own = rows[:, SUM] / rows[:, COUNT].clamp(min=1)
    between = pairwise_sum(rows[:, COUNT] * (own - mean).square())
    ends = torch.cat([rows, rows.new_tensor([[0.0, 0.0, 0.0, torch.inf, -torch.inf]])])  # an empty batch has them too
    lowest, highest = ends[:, LOWEST].amin(), ends[:, HIGHEST].amax()
    return Moments(count=count, total=total, mean=mean, squares=within + between, lowest=lowest, highest=highest)


def whiten(values: Tensor, mask: Tensor, gather: Gather = HERE) -> Tensor:
    """Returns (x - mean) * rsqrt(var + 1e-8) over the mask, 0 outside it; the variance is unbiased, 0 for fewer than two values.

    values, mask: (rows, tokens), the rows of this process; mean and variance are those of the whole batch.  No gradient flows.
    """
    return whitened(values, mask, batch_moments(gather(row_moments(values, mask))))


def whitened(values: Tensor, mask: Tensor, moments: Moments) -> Tensor:
    """Returns what `whiten` does, of some rows of the batch with these moments.

    The mean is subtracted in two parts, rounded and rest: where all values are equal, float32's rounding of their mean times 1e4
    would be a large advantage.
    """
    rounded = moments.mean.to(values.dtype)
    rest = (moments.mean - rounded).to(values.dtype)
    variance = moments.squares / (moments.count - 1).clamp(min=1)
    return masked(masked(values.detach(), mask) - rounded - rest, mask) * torch.rsqrt(variance + VARIANCE_EPS).to(values.dtype)
