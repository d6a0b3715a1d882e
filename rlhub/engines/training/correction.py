"""The rollout correction where the old log-probs have no forward pass of their own: computed in the update, row by row.

Two such modes.  Bypass: pi_old := mu, so l = log pi_old - log mu would be 0 and every correction would vanish without a word;
instead l = sg(log pi) - log mu with the current policy pi.  A-3PO: pi_old is interpolated between mu and pi, and l is taken
from it.

In bypass mode a loss that contains the ratio pi / pi_old has pi / mu in it already: a weight on top would count it twice, so
only rejection is applied.  A loss without a ratio of its own (its registry row requires "weights") gets the weight.

A rejected token has weight 0 here and stays in the loss's denominators, because these are counted over all ranks before the
first forward pass (on the driver, rejected tokens leave the mask and with it the denominators).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhub.algorithms.correction.correct import correct, token_factors
from rlhub.algorithms.correction.weights import log_ratios, proximal_log_probs
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from rlhub.engines.training.base import Rows


@dataclass(slots=True, kw_only=True)
class Anchored:
    """The log-probs that the policy loss compares with and token weights, (rows, response), no gradient.  weights: None where
    nothing is weighted."""

    old_log_probs: Tensor
    weights: Tensor | None
    sums: dict[str, Tensor]


class UpdateCorrection:
    """Old log-probs and token weights of a micro-batch, by the configured mode.

    loss_requires: the `requires` of the policy loss's registry row.
    """

    def __init__(self, config: RolloutCorrectionConfig, loss_requires: AbstractSet[str]) -> None:
        self.config = config
        self.own_ratio = "weights" not in loss_requires
        self.applied = dataclasses.replace(config, rollout_is=None) if config.bypass_mode and self.own_ratio else config

    def anchor(self, log_probs: Tensor, micro: Rows) -> Anchored:
        """Returns the anchor of a micro-batch.  log_probs: the current policy's, (rows, response).  Reads old_log_probs and
        importance_weights where present, in bypass mode old_log_probs (which is mu), with A-3PO rollout_log_probs and, where
        present, staleness."""
        current, mask = log_probs.detach(), micro["response_mask"]
        if not self.config.in_update:
            first_step = "old_log_probs" not in micro
            old = current if first_step else micro["old_log_probs"]
            return Anchored(old_log_probs=old, weights=micro.get("importance_weights"), sums={})
        mu = self.behaviour(micro)
        assert mu is not None
        if self.config.bypass_mode:
            old, measured = mu, current
        else:
            staleness = micro["staleness"] if "staleness" in micro else torch.zeros_like(mask[:, 0])
            old = measured = proximal_log_probs(current, mu, staleness, mask)
        correction = correct(self.applied, log_ratios(measured, mu, mask), mask)
        weights = token_factors(correction).to(current.dtype) if self.applied.active else None
        return Anchored(old_log_probs=old, weights=weights, sums=correction.sums)

    def behaviour(self, rows: Rows) -> Tensor | None:
        """Returns log mu, (rows, response), where the mismatch is measured in the update; None where the driver measures it."""
        if self.config.bypass_mode:
            return rows["old_log_probs"]
        measured_before = "old_log_probs" in rows and not self.config.in_update
        return rows["rollout_log_probs"] if "rollout_log_probs" in rows and not measured_before else None
