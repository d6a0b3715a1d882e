"""The distance between the rollout engine's probabilities and the trainer's, measured every step.

mu is the behaviour policy (the rollout engine's log-probs of the tokens it sampled), pi the trainer's policy with the same
weights.  First come sums of each row's tokens, which add up over the rows of a batch (statistics.py) as over micro-batches
and ranks; then the metrics from the sums.  Extremes do not add up: they are combined by a maximum of their own.  It is measured
over the whole batch where pi has a forward pass of its own (`measure_mismatch`), else in the update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rlhub.algorithms.masked import LOG_RATIO_BOUND, masked
from rlhub.algorithms.statistics import HERE, Gather, pairwise_sum, row_sums

OLDEST_BUCKET = 8
"""Tokens so many versions old, or more, are counted together."""


def measure_mismatch(columns: Mapping[str, Tensor], gather: Gather, version: int | None = None) -> dict[str, float]:
    """Returns mismatch/* of the whole batch, with mismatch/kl/staleness_<s> where it has a column policy_version.

    columns: old_log_probs, rollout_log_probs, response_mask (rows, response).  version: of the policy about to be updated.
    """
    measured = columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]
    rows = mismatch_rows(*measured) | {"extremes": extreme_rows(*measured)}
    if "policy_version" in columns:
        assert version is not None, "a batch with versions says which is the newest"
        rows |= staleness_rows(*measured, staleness_of(columns["policy_version"], version))
    found = gather.each(rows)
    metrics = extreme_metrics(found.pop("extremes").amax(0))
    sums = {name: float(total) for name, total in added(found).items()}
    return mismatch_metrics(sums) | metrics | (staleness_metrics(sums) if "policy_version" in columns else {})


def staleness_of(policy_version: Tensor, version: int) -> Tensor:
    """Returns by how many versions each token is behind policy `version`, which is about to be updated; never below 0.

    policy_version: (rows, response) or (rows,), of the policy that sampled.
    """
    return (version - policy_version).clamp(min=0)


def added(rows: Mapping[str, Tensor], gather: Gather = HERE) -> dict[str, Tensor]:
    """Returns the sums over the batch of (rows,) columns, added in the order of the rows."""
    return {name: pairwise_sum(column) for name, column in gather.each(rows).items()}


def mismatch_rows(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Returns sums over each row's model tokens, (rows,); log_probs, rollout_log_probs (rows, response), no gradient kept.

    They are float64: the differences measured are near float32's rounding.
    """
    pi, mu = masked(log_probs.detach().double(), mask), masked(rollout_log_probs.double(), mask)
    log_ratio = (pi - mu).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    weight = log_ratio.exp()
    columns = {
        "mismatch_tokens": torch.ones_like(pi),
        "mismatch_log_pi": pi,
        "mismatch_log_mu": mu,
        "mismatch_k3": weight - log_ratio - 1,
        "mismatch_abs": log_ratio.abs(),
        "mismatch_weight": weight,
        "mismatch_weight_squared": weight.square(),
    }
    return {name: row_sums(column, mask) for name, column in columns.items()}


def mismatch_sums(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Returns `mismatch_rows` added over the rows, float64 scalars."""
    return added(mismatch_rows(log_probs, rollout_log_probs, mask))


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


def staleness_rows(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, staleness: Tensor) -> dict[str, Tensor]:
    """Returns sums over each row's model tokens of each age, (rows,) float64: `mismatch_tokens_<s>` and `mismatch_kl_<s>` (log mu
    - log pi).

    staleness: whole policy versions, (rows, response) or (rows,); its values outside the mask do not count.
    """
    difference = masked(rollout_log_probs.double(), mask) - masked(log_probs.detach().double(), mask)
    versions = staleness if staleness.dim() == 2 else staleness[:, None]
    ages = versions.clamp(0, OLDEST_BUCKET).expand_as(difference)
    found: dict[str, Tensor] = {}
    for age in range(OLDEST_BUCKET + 1):
        of_age = mask.bool() & (ages == age)
        found[f"mismatch_tokens_{age}"] = of_age.sum(1).double()
        found[f"mismatch_kl_{age}"] = row_sums(difference, of_age)
    return found


def staleness_sums(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, staleness: Tensor) -> dict[str, Tensor]:
    """Returns `staleness_rows` added over the rows, float64 scalars."""
    return added(staleness_rows(log_probs, rollout_log_probs, mask, staleness))


def staleness_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Returns mismatch/kl/staleness_<s> from `staleness_sums`, mismatch/kl of the tokens so many versions old, the last with all
    that are older; nothing for an age without tokens."""
    counts = {age: sums[f"mismatch_tokens_{age}"] for age in range(OLDEST_BUCKET + 1)}
    return {f"mismatch/kl/staleness_{age}": sums[f"mismatch_kl_{age}"] / count for age, count in counts.items() if count}


def extreme_rows(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Returns [-min, max] of w = pi / mu over each row's model tokens, (rows, 2) float64; -inf without any."""
    pi, mu = masked(log_probs.detach().double(), mask), masked(rollout_log_probs.double(), mask)
    weight = (pi - mu).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    nothing = torch.full_like(weight, -math.inf)
    return torch.stack([torch.where(mask.bool(), signed, nothing).amax(1) for signed in (-weight, weight)], 1)


def weight_extremes(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """Returns [-min, max] of w over all rows, (2,) float64.  Over parts, and over ranks, the maximum of such pairs is that of the
    whole."""
    return extreme_rows(log_probs, rollout_log_probs, mask).amax(0)


def extreme_metrics(extremes: Tensor) -> dict[str, float]:
    """Returns mismatch/weight_min and mismatch/weight_max; nothing where there was no token."""
    lowest, highest = extremes.tolist()
    return {} if highest == -math.inf else {"mismatch/weight_min": -lowest, "mismatch/weight_max": highest}
