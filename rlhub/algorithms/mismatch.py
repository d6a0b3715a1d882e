"""How far the rollout engine's probabilities are from the trainer's, measured every step.

mu is the behaviour policy (the rollout engine's log-probs of the tokens it sampled), pi the trainer's policy with the same
weights.  Token sums first, so they add up over micro-batches and ranks; then the metrics from the sums.  Extremes do not add
up: they are combined by a maximum of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rlhub.algorithms.masked import LOG_RATIO_BOUND, masked, masked_sum

OLDEST_BUCKET = 8
"""Tokens so many versions old, or more, are counted together."""


def mismatch_sums(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Returns sums over model tokens; log_probs and rollout_log_probs (rows, response), no gradient kept.

    In float64: the differences measured are near float32's rounding.
    """
    pi, mu = masked(log_probs.detach().double(), mask), masked(rollout_log_probs.double(), mask)
    log_ratio = (pi - mu).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight = masked(log_ratio.exp(), mask)
    return {
        "mismatch_tokens": mask.to(pi.dtype).sum(),
        "mismatch_log_pi": pi.sum(),
        "mismatch_log_mu": mu.sum(),
        "mismatch_k3": masked_sum(weight - log_ratio - 1, mask),
        "mismatch_abs": log_ratio.abs().sum(),
        "mismatch_weight": weight.sum(),
        "mismatch_weight_squared": weight.square().sum(),
    }


def mismatch_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns mismatch/kl, the mean of log mu - log pi, an estimate of KL(mu, pi).  k3: the same, never negative.  ppl: exp(-mean
    log-prob). ess: (sum w)^2 / (N sum w^2), w = pi / mu, 1 when the two agree."""
    tokens = max(sums["mismatch_tokens"], 1.0)
    pi_ppl = math.exp(min(-sums["mismatch_log_pi"] / tokens, LOG_RATIO_BOUND))
    mu_ppl = math.exp(min(-sums["mismatch_log_mu"] / tokens, LOG_RATIO_BOUND))
    return {
        "mismatch/kl": (sums["mismatch_log_mu"] - sums["mismatch_log_pi"]) / tokens,
        "mismatch/k3": sums["mismatch_k3"] / tokens,
        "mismatch/abs_diff": sums["mismatch_abs"] / tokens,
        "mismatch/trainer_ppl": pi_ppl,
        "mismatch/rollout_ppl": mu_ppl,
        "mismatch/ppl_diff": pi_ppl - mu_ppl,
        "mismatch/weight_mean": sums["mismatch_weight"] / tokens,
        "mismatch/ess": sums["mismatch_weight"] ** 2 / (tokens * max(sums["mismatch_weight_squared"], 1e-30)),
    }


def staleness_sums(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, staleness: Tensor) -> dict[str, Tensor]:
    """Returns sums over the model tokens of each age: `mismatch_tokens_<s>` and `mismatch_kl_<s>` (log mu - log pi), float64.

    staleness: whole policy versions, (rows, response) or (rows,); its values outside the mask do not count.
    """
    difference = masked(rollout_log_probs.double(), mask) - masked(log_probs.detach().double(), mask)
    versions = staleness if staleness.dim() == 2 else staleness[:, None]
    ages = versions.clamp(0, OLDEST_BUCKET).expand_as(difference).long().flatten()
    found: dict[str, Tensor] = {}
    for name, values in (("mismatch_tokens", mask.to(difference.dtype)), ("mismatch_kl", difference)):
        totals = difference.new_zeros(OLDEST_BUCKET + 1).index_add(0, ages, values.flatten())
        found |= {f"{name}_{age}": total for age, total in enumerate(totals)}
    return found


def staleness_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns mismatch/kl/staleness_<s> from `staleness_sums`, mismatch/kl of the tokens so many versions old, the last with all
    that are older; nothing for an age without tokens."""
    counts = {age: sums[f"mismatch_tokens_{age}"] for age in range(OLDEST_BUCKET + 1)}
    return {f"mismatch/kl/staleness_{age}": sums[f"mismatch_kl_{age}"] / count for age, count in counts.items() if count}


def weight_extremes(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Returns [-min, max] of w = pi / mu over model tokens, (2,) float64; -inf without any.  Over parts, and over ranks, the
    maximum of such pairs is that of the whole."""
    pi, mu = masked(log_probs.detach().double(), mask), masked(rollout_log_probs.double(), mask)
    weight = (pi - mu).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    nothing = torch.full_like(weight, -math.inf)
    return torch.stack([torch.where(mask.bool(), signed, nothing).amax() for signed in (-weight, weight)])


def extreme_metrics(extremes: Tensor) -> dict[str, float]:
    """Returns mismatch/weight_min and mismatch/weight_max; nothing where there was no token."""
    lowest, highest = extremes.tolist()
    return {} if highest == -math.inf else {"mismatch/weight_min": -lowest, "mismatch/weight_max": highest}
