"""The updates of a batch: the losses on an engine's outputs, the optimizer steps, and their metrics.

    PolicyUpdater, ValueUpdater     PPO's updates from a rollout batch, with one optimizer step per mini-batch
    UpdateCorrection                the rollout correction that is computed inside the policy's update
    sft_loss                        the loss of supervised fine-tuning

Steps do not depend on the number of ranks or on micro-batches.  The driver assigns rows to mini-batches (column `mini_batch`),
and all denominators are counted over all ranks before the first forward pass.

Rollout correction.  Where the old log-probs have no forward pass of their own, the correction is computed here.  It reads the
log-ratio l in one of two modes, with the rollout engine's policy mu and the current policy pi:

    bypass   pi_old := mu; l = sg(log pi) - log mu, because log pi_old - log mu is 0 and every correction would silently vanish
    A-3PO    pi_old is interpolated between mu and pi; l = log pi_old - log mu

In bypass mode a loss that contains the ratio pi / pi_old has pi / mu in it already.  A weight on top would count it twice, so
only rejection is applied.  A loss without a ratio of its own (its registry row requires "weights") gets the weight.  A
rejected token has weight 0 and stays in the loss's denominators, unlike on the driver, where rejected tokens leave the mask
and with it the denominators.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlhub.algorithms.correction.correct import correct, token_factors
from rlhub.algorithms.correction.weights import log_ratios, proximal_log_probs
from rlhub.algorithms.inputs import PolicyLossInputs
from rlhub.algorithms.levels import TOKENS, Units
from rlhub.algorithms.masked import Denominators, aggregate, masked, masked_sum
from rlhub.algorithms.mismatch import (
    extreme_metrics,
    mismatch_metrics,
    mismatch_sums,
    staleness_metrics,
    staleness_of,
    staleness_sums,
    weight_extremes,
)
from rlhub.algorithms.registry import KL_ESTIMATORS, POLICY_LOSSES
from rlhub.algorithms.returns import value_loss
from rlhub.config.sections.actor import ActorConfig
from rlhub.config.sections.ppo import CriticConfig
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows, StepReport, TrainEngine
from rlhub.registry import knobs_for

StepLoss = Callable[[ForwardOutputs, Rows, Denominators], LossOutput]
"""A loss of one micro-batch, given the denominators of its optimizer step."""


class PolicyUpdater:
    """Steps a policy loss, with optional entropy bonus, KL loss and value loss, over the mini-batches of a batch.

    Every rank calls `update` together.  Columns read: input_ids, attention_mask, loss_mask (without it learn_mask, and without
    both response_mask, so that every token of the model trains), advantages, and if present old_log_probs, ref_log_prob,
    rollout_log_probs, importance_weights, selected, policy_version, mini_batch; with a value loss values and returns.
    Denominators count units of config.log_prob_level.  Without old_log_probs, the policy being stepped
    is the policy at the start of the update (see `Requirements`).
    """

    def __init__(
        self,
        engine: TrainEngine,
        config: ActorConfig,
        *,
        scale: float,
        correction: RolloutCorrectionConfig | None = None,
        action_dim: int = 1,
    ) -> None:
        self.engine, self.config, self.scale = engine, config, scale
        self.units = Units(level=config.log_prob_level, action_dim=action_dim)
        loss_requires = POLICY_LOSSES.row(config.policy_loss.loss_mode).requires
        self.correction = UpdateCorrection(correction or RolloutCorrectionConfig(), loss_requires)
        self.loss = POLICY_LOSSES.get(config.policy_loss.loss_mode)
        self.knobs = knobs_for(
            POLICY_LOSSES.knobs_class(config.policy_loss.loss_mode),
            config,
            config.policy_loss.kwargs,
            where="actor_rollout_ref.actor.policy_loss.kwargs",
        )
        self.kl = KL_ESTIMATORS.get(config.kl_loss_type) if config.use_kl_loss else None

    def update(self, rows: Rows, num_mini_batches: int, version: int | None = None) -> dict[str, float]:
        """Takes all optimizer steps of this batch; returns metrics, which are equal on every rank.

        version: of the policy about to be updated, read with a column policy_version.
        """
        mask = "loss_mask" if "loss_mask" in rows else "learn_mask"
        extremes, rows = Extremes(), with_staleness(counting(rows, mask), version)
        steps = take_steps(
            self.engine,
            rows,
            partial(self._loss, extremes),
            num_mini_batches=num_mini_batches,
            epochs=self.config.ppo_epochs,
            scale=self.scale,
            outputs=("log_probs", "entropy", *(("values",) if self.config.value_loss_coef else ())),
            units=self.units,
        )
        metrics = policy_metrics(steps)
        if self.correction.behaviour(rows) is not None:
            metrics |= extremes.metrics(self.engine)
        return metrics

    def _loss(self, extremes: Extremes, outputs: ForwardOutputs, micro: Rows, denominators: Denominators) -> LossOutput:
        outputs, micro = self._of_units(outputs, micro)
        assert outputs.log_probs is not None and outputs.entropy is not None
        mask, mode = micro["response_mask"], self.config.loss_agg_mode
        anchor = self.correction.anchor(outputs.log_probs, micro)
        policy = self.loss(
            PolicyLossInputs(
                log_probs=outputs.log_probs,
                old_log_probs=anchor.old_log_probs,
                advantages=micro["advantages"],
                response_mask=mask,
                weights=anchor.weights,
                rollout_log_probs=micro.get("rollout_log_probs"),
                selected=micro.get("selected"),
            ),
            self.knobs,
        )
        loss = aggregate(policy.loss, mask, mode, denominators)
        sums = {"pg_loss": loss.detach(), "entropy": masked_sum(outputs.entropy.detach(), mask)}
        sums |= policy.sums | anchor.sums
        if self.config.entropy_coeff:
            loss = loss - self.config.entropy_coeff * aggregate(outputs.entropy, mask, mode, denominators)
        if self.kl is not None:
            # Mask the inputs and not the result: the gradient of a masked value that is not finite would be 0 * NaN.
            kl = self.kl(masked(outputs.log_probs, mask), masked(micro["ref_log_prob"], mask))
            loss = loss + self.config.kl_loss_coef * aggregate(kl, mask, mode, denominators)
            sums["kl_loss"] = masked_sum(kl.detach(), mask)
        if outputs.values is not None:
            value = value_loss(outputs.values, micro["values"], micro["returns"], mask, self.config.cliprange_value)
            loss = loss + self.config.value_loss_coef * aggregate(value.loss, mask, mode, denominators)
            sums |= {
                "vf_loss": masked_sum(value.loss.detach(), mask),
                **{name: value.sums[name] for name in ("vf_clipfrac", "vpred")},
            }
        behaviour = self.correction.behaviour(micro)
        if behaviour is not None:
            sums |= mismatch_sums(outputs.log_probs, behaviour, mask)
            if "staleness" in micro:
                sums |= staleness_sums(outputs.log_probs, behaviour, mask, micro["staleness"])
            extremes.add(denominators, weight_extremes(outputs.log_probs, behaviour, mask))
        return LossOutput(loss=loss, sums=sums)

    def _of_units(self, outputs: ForwardOutputs, micro: Rows) -> tuple[ForwardOutputs, Rows]:
        """Returns outputs and columns with one value for each unit of the loss."""
        mask = micro["response_mask"]
        found = {name: getattr(outputs, name) for name in ("log_probs", "entropy", "values")}
        found = self.units.columns({name: column for name, column in found.items() if column is not None}, mask)
        return ForwardOutputs(**found), self.units.columns(micro, mask)


class UpdateCorrection:
    """Computes old log-probs and token weights of a micro-batch, in the configured mode.

    loss_requires: the `requires` of the policy loss's registry row.
    """

    def __init__(self, config: RolloutCorrectionConfig, loss_requires: AbstractSet[str]) -> None:
        self.config = config
        self.own_ratio = "weights" not in loss_requires
        self.applied = dataclasses.replace(config, rollout_is=None) if config.bypass_mode and self.own_ratio else config

    def anchor(self, log_probs: Tensor, micro: Rows) -> AnchoredLogProbs:
        """Returns the anchor of a micro-batch.

        Columns read: old_log_probs and importance_weights if present; in bypass mode old_log_probs, which is mu, or without it
        rollout_log_probs; with A-3PO the latter and, if present, staleness.  log_probs: those of the current policy, (rows,
        response).
        """
        current, mask = log_probs.detach(), micro["response_mask"]
        if not self.config.in_update:
            first_step = "old_log_probs" not in micro
            old = current if first_step else micro["old_log_probs"]
            return AnchoredLogProbs(old_log_probs=old, weights=micro.get("importance_weights"), sums={})
        mu = self.behaviour(micro)
        assert mu is not None
        if self.config.bypass_mode:
            old, measured = mu, current
        else:
            staleness = micro["staleness"] if "staleness" in micro else torch.zeros_like(mask[:, 0])
            old = measured = proximal_log_probs(current, mu, staleness, mask)
        correction = correct(self.applied, log_ratios(measured, mu, mask), mask)
        weights = token_factors(correction).to(current.dtype) if self.applied.active else None
        return AnchoredLogProbs(old_log_probs=old, weights=weights, sums=correction.sums)

    def behaviour(self, rows: Rows) -> Tensor | None:
        """Returns log mu, (rows, response), if the mismatch is measured in the update; None if the driver measures it."""
        if self.config.bypass_mode:
            return rows["old_log_probs"] if "old_log_probs" in rows else rows["rollout_log_probs"]
        measured_before = "old_log_probs" in rows and not self.config.in_update
        return rows["rollout_log_probs"] if "rollout_log_probs" in rows and not measured_before else None


@dataclass(slots=True, kw_only=True)
class AnchoredLogProbs:
    """The anchor of a policy loss: the log-probs that it compares with, and token weights, both (rows, response) without
    gradient.

    weights: None if no token is weighted.
    """

    old_log_probs: Tensor
    weights: Tensor | None
    sums: dict[str, Tensor]


class Extremes:
    """The smallest and largest weight pi / mu of the batch's first optimizer step.

    They do not add up over micro-batches as a LossOutput's sums do, so they are collected here and reduced once, at the end of
    the batch.
    """

    def __init__(self) -> None:
        self._step: Denominators | None = None
        self._pair: Tensor | None = None

    def add(self, step: Denominators, pair: Tensor) -> None:
        """Adds the pair of one micro-batch.  step: its optimizer step; only the first one uses the policy that sampled."""
        if self._step is None:
            self._step, self._pair = step, pair
        elif self._step is step and self._pair is not None:
            self._pair = torch.maximum(self._pair, pair)

    def metrics(self, engine: TrainEngine) -> dict[str, float]:
        """Returns the metrics over all ranks, because only the last ranks of a pipeline have outputs; every rank calls it."""
        pair = torch.full((2,), -math.inf, dtype=torch.float64, device=engine.device) if self._pair is None else self._pair
        return extreme_metrics(engine.reduce(pair, op="max", every_rank=True))


def policy_metrics(steps: list[StepSums]) -> dict[str, float]:
    """Returns means over the optimizer steps of one batch.  Skipped steps are counted, and left out of the means."""
    done = [step for step in steps if not step.report.skipped]
    metrics = {"actor/skipped_steps": float(len(steps) - len(done)), "actor/optimizer_steps": float(len(done))}
    if steps:
        metrics["actor/lr"] = steps[-1].report.lr
    for step in done:
        tokens = max(step.denominators.tokens, 1.0)
        values = {name: step.sums[name] / tokens for name in step.sums if not name.startswith("mismatch_")}
        values |= {"loss": step.sums["loss"], "pg_loss": step.sums["pg_loss"], "grad_norm": step.report.grad_norm}
        for name, value in values.items():
            key = name if "/" in name else f"actor/{name}"
            metrics[key] = metrics.get(key, 0.0) + value / len(done)
    if steps and "mismatch_tokens" in steps[0].sums:
        metrics |= mismatch_metrics(steps[0].sums)
    if steps and "mismatch_tokens_0" in steps[0].sums:
        metrics |= staleness_metrics(steps[0].sums)
    return metrics


class ValueUpdater:
    """Steps the clipped value loss over the mini-batches of a batch.

    Columns read: input_ids, attention_mask, learn_mask (without it response_mask), values, returns, mini_batch.
    """

    def __init__(self, engine: TrainEngine, config: CriticConfig, *, loss_agg_mode: str, scale: float) -> None:
        self.engine, self.config, self.mode, self.scale = engine, config, loss_agg_mode, scale

    def update(self, rows: Rows, num_mini_batches: int) -> dict[str, float]:
        """Takes all optimizer steps of this batch; returns metrics, which are equal on every rank."""
        assert self.config.ppo_epochs is not None, "derived when the configuration is loaded"
        steps = take_steps(
            self.engine,
            counting(rows, "learn_mask"),
            self._loss,
            num_mini_batches=num_mini_batches,
            epochs=self.config.ppo_epochs,
            scale=self.scale,
            outputs=("values",),
        )
        return value_metrics(steps)

    def _loss(self, outputs: ForwardOutputs, micro: Rows, denominators: Denominators) -> LossOutput:
        assert outputs.values is not None
        mask = micro["response_mask"]
        value = value_loss(outputs.values, micro["values"], micro["returns"], mask, self.config.cliprange_value)
        return LossOutput(loss=aggregate(value.loss, mask, self.mode, denominators), sums=value.sums)


def value_metrics(steps: list[StepSums]) -> dict[str, float]:
    """Returns means over the optimizer steps of one batch.

    vf_explained_var is 1 - mean squared error / variance of the returns: 1 is perfect, 0 is no better than their mean.
    """
    done = [step for step in steps if not step.report.skipped]
    metrics = {"critic/skipped_steps": float(len(steps) - len(done)), "critic/optimizer_steps": float(len(done))}
    if steps:
        metrics["critic/lr"] = steps[-1].report.lr
    for step in done:
        tokens = max(step.denominators.tokens, 1.0)
        variance = step.sums["returns_squared"] / tokens - (step.sums["returns"] / tokens) ** 2
        values = {
            "vf_loss": step.sums["loss"],
            "vf_clipfrac": step.sums["vf_clipfrac"] / tokens,
            "vpred_mean": step.sums["vpred"] / tokens,
            "grad_norm": step.report.grad_norm,
            "vf_explained_var": 1 - step.sums["squared_error"] / tokens / variance if variance > 1e-12 else 0.0,
        }
        for name, value in values.items():
            metrics[f"critic/{name}"] = metrics.get(f"critic/{name}", 0.0) + value / len(done)
    return metrics


def sft_loss(outputs: ForwardOutputs, micro: Rows, denominators: Denominators) -> LossOutput:
    """Returns the negative log-likelihood of the response tokens, averaged over all tokens of the step."""
    assert outputs.log_probs is not None
    return LossOutput(loss=aggregate(-outputs.log_probs, micro["response_mask"], "token-mean", denominators))


def counting(rows: Rows, mask: str) -> Rows:
    """Returns the rows with their column `mask`, if they have it, as response_mask: an engine computes only the tokens of
    response_mask, and a loss counts no others."""
    if mask not in rows:
        return rows
    return {name: column for name, column in rows.items() if name != mask} | {"response_mask": rows[mask]}


def with_staleness(rows: Rows, version: int | None) -> Rows:
    """Returns the rows with how many versions each token is behind `version` in place of a column policy_version."""
    if version is None or "policy_version" not in rows:
        return rows
    found = {name: column for name, column in rows.items() if name != "policy_version"}
    return found | {"staleness": staleness_of(rows["policy_version"], version)}


def take_steps(
    engine: TrainEngine,
    rows: Rows,
    loss: StepLoss,
    *,
    num_mini_batches: int,
    epochs: int,
    scale: float,
    outputs: tuple[str, ...],
    units: Units = TOKENS,
) -> list[StepSums]:
    """Takes one optimizer step for each mini-batch of each epoch.  units: what the denominators count.

    A mini-batch without a token to learn from takes no step, because the optimizer's momentum and decay would move the
    weights.
    """
    steps = []
    for mini in mini_batches(rows, num_mini_batches, epochs):
        denominators = count_denominators(engine, units.mask(mini["response_mask"]), scale)
        if denominators.tokens == 0:
            continue
        sums = engine.forward_backward(mini, partial(_with_denominators, loss, denominators), outputs=outputs)
        steps.append(StepSums(sums=sums, denominators=denominators, report=engine.optimizer_step()))
    return steps


@dataclass(slots=True, kw_only=True)
class StepSums:
    """The result of one optimizer step: its global sums, its denominators, and the optimizer's report."""

    sums: dict[str, float]
    denominators: Denominators
    report: StepReport


def mini_batches(rows: Rows, num_mini_batches: int, epochs: int) -> Iterator[dict[str, Tensor]]:
    """Yields this rank's rows of every optimizer step, in order; a step may have no rows on this rank."""
    for _ in range(epochs):
        for index in range(num_mini_batches):
            if num_mini_batches == 1:
                yield dict(rows.items())
            else:
                yield select_rows(rows, (rows["mini_batch"] == index).nonzero().squeeze(1))


def select_rows(rows: Rows, keep: Tensor) -> dict[str, Tensor]:
    """Returns copies of the rows at the given indices."""
    return {name: column[keep] for name, column in rows.items()}


def count_denominators(engine: TrainEngine, response_mask: Tensor, scale: float) -> Denominators:
    """Counts the model's tokens and the non-empty rows of a step over all ranks."""
    local = torch.stack([response_mask.sum(), response_mask.any(dim=1).sum()]).double()
    tokens, sequences = engine.reduce(local).tolist()
    return Denominators(tokens=tokens, sequences=sequences, scale=scale)


def _with_denominators(loss: StepLoss, denominators: Denominators, outputs: ForwardOutputs, micro: Rows) -> LossOutput:
    return loss(outputs, micro, denominators)
