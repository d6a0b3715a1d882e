"""The rollout correction on the driver: over the whole batch, so that it depends on no rank and no micro-batch.

After the advantages, because a group's baseline uses all of its samples, and after the critic's update, which learns from all
of them: what is rejected leaves only the policy's loss.
"""

from __future__ import annotations

import torch

from rlhub.algorithms.correction.correct import Correction, correct
from rlhub.algorithms.correction.weights import log_ratios
from rlhub.algorithms.mismatch import (
    extreme_metrics,
    mismatch_metrics,
    mismatch_sums,
    staleness_metrics,
    staleness_sums,
    weight_extremes,
)
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from rlhub.protocol import DataProto


def measure_mismatch(batch: DataProto) -> dict[str, float]:
    """mismatch/*: rollout against trainer log-probs (without a forward pass of their own the update measures them)."""
    columns = batch.batch
    measured = columns["old_log_probs"], columns["rollout_log_probs"], columns["response_mask"]
    return mismatch_of(*measured) | extreme_metrics(weight_extremes(*measured)) | mismatch_by_staleness(batch)


def mismatch_of(old_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """mismatch/* without the extremes, over the tokens of the mask."""
    return mismatch_metrics({name: float(value) for name, value in mismatch_sums(old_log_probs, rollout_log_probs, mask).items()})


def mismatch_by_staleness(batch: DataProto) -> dict[str, float]:
    """See `staleness_metrics`; nothing of a batch that is from the newest version alone."""
    add_staleness(batch)
    columns = batch.batch
    if "staleness" not in columns.keys():
        return {}
    names = ("old_log_probs", "rollout_log_probs", "response_mask", "staleness")
    sums = staleness_sums(*(columns[name] for name in names))
    return staleness_metrics({name: float(value) for name, value in sums.items()})


def bypass(batch: DataProto) -> None:
    """pi_old := mu: the rollout's log-probs stand in for the old ones, for everything that reads them."""
    batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]


def add_staleness(batch: DataProto) -> None:
    """Adds staleness: how many policy versions each token is behind the policy about to be updated.

    Column policy_version: (rows, response) or (rows,), of the policy that sampled; meta_info["policy_version"]: the current
    one.  A batch without the column is from the newest version and gets none.
    """
    columns = batch.batch
    if "policy_version" in columns.keys():
        columns["staleness"] = (batch.meta_info["policy_version"] - columns["policy_version"]).clamp(min=0)


def correct_batch(batch: DataProto, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Adds importance_weights (rows, response), takes rejected tokens out of response_mask; returns correction/* and
    mismatch/masked_share.  Where the update corrects, this only prepares it."""
    if config.in_update:
        add_staleness(batch)
        return {}
    if not config.active:
        return {"mismatch/masked_share": 0.0}
    columns, mask = batch.batch, batch.batch["response_mask"]
    log_ratio = log_ratios(columns["old_log_probs"], columns["rollout_log_probs"], mask)
    correction = correct(config, log_ratio, mask, columns["advantages"])
    if correction.weights is not None:
        columns["importance_weights"] = correction.weights.to(columns["old_log_probs"].dtype)
    columns["response_mask"] = mask * correction.keep.to(mask.dtype)
    return correction_metrics(correction, mask)


def correction_metrics(correction: Correction, mask: torch.Tensor) -> dict[str, float]:
    """Means and shares over the model tokens before rejection, and the extremes of the weights that are applied."""
    tokens = max(float(mask.sum()), 1.0)
    metrics = {name: float(total) / tokens for name, total in correction.sums.items()}
    if correction.scale is not None:
        metrics["correction/batch_norm_factor"] = float(correction.scale)
    if correction.weights is not None and bool(correction.keep.any()):
        low, high = torch.aminmax(correction.weights[correction.keep])
        metrics |= {"correction/weight_min": float(low), "correction/weight_max": float(high)}
    return metrics
