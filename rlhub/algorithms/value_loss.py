"""The critic's clipped squared error (Schulman et al. 2017, reference implementation of PPO)."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhub.algorithms.inputs import PolicyLossOutputs
from rlhub.algorithms.masked import masked, masked_sum


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, cliprange: float) -> PolicyLossOutputs:
    """0.5 max((V - G)^2, (clip(V, V_old +- cliprange) - G)^2) per token, (rows, response), 0 outside the mask.

    The sums behind the explained variance are float64: it is a small difference of large numbers.
    """
    values, old_values, returns = (masked(column, response_mask) for column in (values, old_values, returns))
    clipped = values.clamp(old_values - cliprange, old_values + cliprange)  # exactly V inside: rounding is no clip
    plain_error, clipped_error = (values - returns).square(), (clipped - returns).square()
    loss = 0.5 * torch.maximum(plain_error, clipped_error)
    detached, targets = values.detach().double(), returns.double()
    sums = {
        "vf_clipfrac": masked_sum((clipped_error > plain_error).to(values.dtype), response_mask),
        "vpred": masked_sum(detached, response_mask),
        "squared_error": masked_sum((detached - targets).square(), response_mask),
        "returns": masked_sum(targets, response_mask),
        "returns_squared": masked_sum(targets.square(), response_mask),
    }
    return PolicyLossOutputs(loss=masked(loss, response_mask), sums=sums)
