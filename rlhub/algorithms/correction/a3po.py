"""A-3PO (arXiv 2512.06547): the proximal policy of decoupled PPO by interpolation instead of a forward pass of its own.

The staler a token, the nearer the proximal policy is to the current one; a token of the newest published version needs none.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhub.algorithms.masked import masked


def proximal_log_probs(log_probs: Tensor, rollout_log_probs: Tensor, staleness: Tensor, mask: Tensor) -> Tensor:
    """log pi_prox = log mu + ((d - 1) / d) (sg log pi - log mu) for d >= 1, sg log pi for d = 0.

    log_probs (current policy), rollout_log_probs (mu), mask: (rows, response).  staleness: d, whole policy versions, (rows,
    response) or (rows,).  Returns (rows, response) in log_probs' dtype, without gradient, 0 outside the mask.
    """
    versions = (staleness if staleness.dim() == 2 else staleness[:, None]).double()
    pi, mu = log_probs.detach().double(), rollout_log_probs.detach().double()
    share = (versions - 1) / versions.clamp(min=1)
    interpolated = torch.where(versions >= 1, mu + share * (pi - mu), pi)
    return masked(interpolated, mask).to(log_probs.dtype)
