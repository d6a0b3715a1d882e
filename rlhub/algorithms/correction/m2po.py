"""M2PO (Zheng et al. 2025, "Prosperity before collapse", arXiv 2510.01161): hold the second moment of log(pi / mu) over a
batch under a threshold by dropping as few tokens as possible.

Only tokens that a trust region would hold count: those where advantage and log-ratio have the same sign, that is where the
policy has already moved the way the advantage pushes.  (Some implementations take the moment over all tokens; then tokens on
their way back, which no clip touches, would be dropped too.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhub.algorithms.masked import masked


def candidates(log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Model tokens whose advantage and log-ratio have the same sign (neither is 0), (rows, response) bool."""
    return (masked(advantages, mask).sign() * masked(log_ratio, mask).sign() > 0) & mask.bool()


def second_moment(log_ratio: Tensor, chosen: Tensor) -> Tensor:
    """Mean of l^2 over the chosen tokens, 0 without any; scalar."""
    return masked(log_ratio, chosen).square().sum() / chosen.sum().clamp(min=1)


def m2po_kept(log_ratio: Tensor, advantages: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """The model tokens that stay, (rows, response) bool: of the candidates the largest l^2 are dropped until the mean of the
    rest is at most `threshold`; other model tokens always stay.

    Over the whole batch.  Equally large ones go together, so that the order of the rows does not matter.
    """
    chosen = candidates(log_ratio, advantages, mask)
    moments = masked(log_ratio, mask).square()
    ordered = moments[chosen].sort(descending=True).values
    left = torch.arange(len(ordered), 0, -1, device=ordered.device)
    means = ordered.flip(0).cumsum(0).flip(0) / left  # means[k]: after dropping the k largest; falls with k
    num_dropped = int((means > threshold).sum().item())
    if num_dropped == 0:
        return mask.bool()
    return mask.bool() & ~(chosen & (moments >= ordered[num_dropped - 1]))
