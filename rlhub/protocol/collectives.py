"""Collectives for rows of unequal number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_rows(tensor: Tensor, counts: Sequence[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Every rank's rows of `tensor` (rows, ...), in rank order; `counts` are the ranks' numbers of rows.

    Every rank of `group` calls; blocking.  Rows are padded to the longest for the collective.
    """
    padded = tensor.new_zeros((max(counts), *tensor.shape[1:]))
    padded[: len(tensor)] = tensor
    gathered = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(gathered, padded, group=group)
    return [rows[:count] for rows, count in zip(gathered, counts, strict=True)]
