"""One update of the policy or the value model from a rollout batch: mini-batches, losses and their metrics.

The mini-batch is the optimizer step.  Its rows are fixed by the driver (column `mini_batch`), so the same rows make the same
step whatever the number of ranks; denominators are counted over all ranks before the first forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlhub.algorithms.aggregation import Denominators, aggregate
from rlhub.algorithms.inputs import PolicyLossInputs
from rlhub.algorithms.masked import masked, masked_sum
from rlhub.algorithms.mismatch import (
    extreme_metrics,
    mismatch_metrics,
    mismatch_sums,
    staleness_metrics,
    staleness_sums,
    weight_extremes,
)
from rlhub.algorithms.registry import KL_ESTIMATORS, POLICY_LOSSES
from rlhub.algorithms.value_loss import value_loss
from rlhub.config.sections.actor import ActorConfig
from rlhub.config.sections.ppo import CriticConfig
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows, StepReport, TrainEngine
from rlhub.engines.training.correction import UpdateCorrection
from rlhub.registry import knobs_for


@dataclass(slots=True, kw_only=True)
class StepSums:
    """The results of one optimizer step: its global sums, its token count and the optimizer's report."""

    sums: dict[str, float]
    denominators: Denominators
    report: StepReport


def select_rows(rows: Rows, keep: Tensor) -> dict[str, Tensor]:
    """Returns copies of the rows at the given indices."""
    return {name: column[keep] for name, column in rows.items()}


def mini_batches(rows: Rows, num_mini_batches: int, epochs: int) -> Iterator[dict[str, Tensor]]:
    """Yields this rank's rows of every optimizer step, in order; a step may have no rows here."""
    for _ in range(epochs):
        for index in range(num_mini_batches):
            if num_mini_batches == 1:
                yield dict(rows.items())
            else:
                yield select_rows(rows, (rows["mini_batch"] == index).nonzero().squeeze(1))


def count_denominators(engine: TrainEngine, response_mask: Tensor, scale: float) -> Denominators:
    """Counts model tokens and non-empty rows of the step over all ranks."""
    local = torch.stack([response_mask.sum(), response_mask.any(dim=1).sum()]).double()
    tokens, sequences = engine.reduce(local).tolist()
    return Denominators(tokens=tokens, sequences=sequences, scale=scale)


StepLoss = Callable[[ForwardOutputs, Rows, Denominators], LossOutput]


def take_steps(
    engine: TrainEngine, rows: Rows, loss: StepLoss, *, num_mini_batches: int, epochs: int, scale: float, outputs: tuple[str, ...]
) -> list[StepSums]:
    """Takes one optimizer step for each mini-batch of each epoch.  A mini-batch without a token to learn from takes none: the
    optimizer's momentum and decay would move the weights."""
    steps = []
    for mini in mini_batches(rows, num_mini_batches, epochs):
        denominators = count_denominators(engine, mini["response_mask"], scale)
        if denominators.tokens == 0:
            continue
        sums = engine.forward_backward(mini, partial(_with_denominators, loss, denominators), outputs=outputs)
        steps.append(StepSums(sums=sums, denominators=denominators, report=engine.optimizer_step()))
    return steps


def _with_denominators(loss: StepLoss, denominators: Denominators, outputs: ForwardOutputs, micro: Rows) -> LossOutput:
    return loss(outputs, micro, denominators)


class PolicyUpdater:
    """Policy loss, optional entropy bonus and KL loss, stepped over the mini-batches of a batch.

    Every rank calls `update` together.  Columns read: input_ids, attention_mask, response_mask, advantages, and when present
    old_log_probs (absent: the policy at the start of the update is the one being stepped, see `Requirements`),
    ref_log_prob, rollout_log_probs, importance_weights, selected, staleness, mini_batch.
    """

    def __init__(
        self, engine: TrainEngine, config: ActorConfig, *, scale: float, correction: RolloutCorrectionConfig | None = None
    ) -> None:
        self.engine, self.config, self.scale = engine, config, scale
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

    def update(self, rows: Rows, num_mini_batches: int) -> dict[str, float]:
        """Takes all optimizer steps of this batch; returns metrics, the same on every rank."""
        extremes = Extremes()
        steps = take_steps(
            self.engine,
            rows,
            partial(self._loss, extremes),
            num_mini_batches=num_mini_batches,
            epochs=self.config.ppo_epochs,
            scale=self.scale,
            outputs=("log_probs", "entropy"),
        )
        metrics = policy_metrics(steps)
        if self.correction.behaviour(rows) is not None:
            metrics |= extremes.metrics(self.engine)
        return metrics

    def _loss(self, extremes: Extremes, outputs: ForwardOutputs, micro: Rows, denominators: Denominators) -> LossOutput:
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
            # Masked before, not after: the gradient of a masked value that is not finite would be 0 * NaN.
            kl = self.kl(masked(outputs.log_probs, mask), masked(micro["ref_log_prob"], mask))
            loss = loss + self.config.kl_loss_coef * aggregate(kl, mask, mode, denominators)
            sums["kl_loss"] = masked_sum(kl.detach(), mask)
        behaviour = self.correction.behaviour(micro)
        if behaviour is not None:
            sums |= mismatch_sums(outputs.log_probs, behaviour, mask)
            if "staleness" in micro:
                sums |= staleness_sums(outputs.log_probs, behaviour, mask, micro["staleness"])
            extremes.add(denominators, weight_extremes(outputs.log_probs, behaviour, mask))
        return LossOutput(loss=loss, sums=sums)


class Extremes:
    """Smallest and largest weight pi / mu of the batch's first optimizer step.  They do not add up over micro-batches as a
    LossOutput's sums do, so they are collected here and cost one small all-reduce when the batch is done."""

    def __init__(self) -> None:
        self._step: Denominators | None = None
        self._pair: Tensor | None = None

    def add(self, step: Denominators, pair: Tensor) -> None:
        """Adds the pair of one micro-batch.  step: of the optimizer; only the first is on the sampled policy."""
        if self._step is None:
            self._step, self._pair = step, pair
        elif self._step is step and self._pair is not None:
            self._pair = torch.maximum(self._pair, pair)

    def metrics(self, engine: TrainEngine) -> dict[str, float]:
        """Returns metrics over all ranks, since only those that end a pipeline have outputs; every rank calls it."""
        pair = torch.full((2,), -math.inf, dtype=torch.float64, device=engine.device) if self._pair is None else self._pair
        return extreme_metrics(engine.reduce(pair, op="max", every_rank=True))


def policy_metrics(steps: list[StepSums]) -> dict[str, float]:
    """Means over the optimizer steps of one batch (skipped steps are counted, and left out of the means)."""
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
    """Clipped value loss stepped over the mini-batches of a batch.  Columns read: input_ids, attention_mask, response_mask,
    values, returns, mini_batch."""

    def __init__(self, engine: TrainEngine, config: CriticConfig, *, loss_agg_mode: str, scale: float) -> None:
        self.engine, self.config, self.mode, self.scale = engine, config, loss_agg_mode, scale

    def update(self, rows: Rows, num_mini_batches: int) -> dict[str, float]:
        """Takes all optimizer steps of this batch; returns metrics, the same on every rank."""
        assert self.config.ppo_epochs is not None, "derived when the configuration is loaded"
        steps = take_steps(
            self.engine,
            rows,
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
    """Returns means over the steps.  vf_explained_var: 1 - mean squared error / variance of the returns (1 is perfect, 0 no
    better than their mean)."""
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
    """Returns the negative log-likelihood of the response tokens, averaged over all of the step's tokens."""
    assert outputs.log_probs is not None
    return LossOutput(loss=aggregate(-outputs.log_probs, micro["response_mask"], "token-mean", denominators))
