"""The updates of a batch: the losses on an engine's outputs, the optimizer steps, and their metrics.

    PolicyUpdater, ValueUpdater     PPO's updates from a rollout batch, with one optimizer step per mini-batch
    sft_loss                        the loss of supervised fine-tuning
    take_pair_step, evaluate_pairs  one step on preference pairs, and their evaluation, with DPOLoss or RewardLoss

Steps do not depend on the number of ranks or on micro-batches.  The driver assigns rows to mini-batches (column `mini_batch`),
and all denominators are counted over all ranks before the first forward pass.

Preference pairs.  A pair is two neighbouring rows: 2i is the chosen answer, 2i + 1 the rejected one.  Engines cut
micro-batches in whole pairs, and a loss is divided by the number of pairs over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhub.algorithms.correction.correct import UpdateCorrection
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
from rlhub.algorithms.preference import PreferenceInputs, bradley_terry
from rlhub.algorithms.registry import KL_ESTIMATORS, POLICY_LOSSES, PREFERENCE_LOSSES
from rlhub.algorithms.returns import value_loss
from rlhub.config.sections.actor import ActorConfig
from rlhub.config.sections.ppo import CriticConfig
from rlhub.config.sections.preference import DPOLossConfig
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows, StepReport, TrainEngine
from rlhub.errors import ConfigError
from rlhub.protocol.columns import take_rows
from rlhub.registry import knobs_for

PAIR = 2  # rows of a preference pair
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
        taken = take_steps(
            self.engine,
            rows,
            partial(self._loss, extremes),
            num_mini_batches=num_mini_batches,
            epochs=self.config.ppo_epochs,
            scale=self.scale,
            outputs=self._outputs,
            units=self.units,
        )
        steps = []
        for step in taken:
            steps.append(step)
            if self._moved_far(step):
                break
        metrics = policy_metrics(steps)
        if self.correction.behaviour(rows) is not None:
            metrics |= extremes.metrics(self.engine)
        if self.engine.expert_load is not None:
            metrics |= self.engine.expert_load.metrics(self.engine.reduce)
        return metrics

    @property
    def _outputs(self) -> tuple[str, ...]:
        """Returns the outputs that the loss and the metrics read."""
        entropy = self.config.calculate_entropy or self.config.entropy_coeff != 0
        return ("log_probs", *(("entropy",) if entropy else ()), *(("values",) if self.config.value_loss_coef else ()))

    def _moved_far(self, step: StepSums) -> bool:
        """Returns whether the policy is further from the old one than the setting allows.  Raises ConfigError for a loss that
        does not measure it."""
        limit = self.config.target_kl
        if limit is None:
            return False
        if "ppo_kl" not in step.sums:
            loss = self.config.policy_loss.loss_mode
            raise ConfigError(f"actor.target_kl={limit} reads ppo_kl, which policy loss {loss!r} does not report; set it to null")
        return step.sums["ppo_kl"] > limit * step.denominators.tokens

    def _loss(self, extremes: Extremes, outputs: ForwardOutputs, micro: Rows, denominators: Denominators) -> LossOutput:
        outputs, micro = self._of_units(outputs, micro)
        assert outputs.log_probs is not None
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
        sums = {"pg_loss": loss.detach(), **policy.sums, **anchor.sums}
        if outputs.entropy is not None:
            sums["entropy"] = masked_sum(outputs.entropy.detach(), mask)
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
        computed = {name: getattr(outputs, name) for name in ("log_probs", "entropy", "values")}
        found = self.units.columns({name: column for name, column in computed.items() if column is not None}, mask)
        return ForwardOutputs(**found), self.units.columns(micro, mask)


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
        values = {name: step.sums[name] / tokens for name in step.sums if not name.startswith(("mismatch_", "prefix_"))}
        values |= {"loss": step.sums["loss"], "pg_loss": step.sums["pg_loss"], "grad_norm": step.report.grad_norm}
        for name, value in values.items():
            key = name if "/" in name else f"actor/{name}"
            metrics[key] = metrics.get(key, 0.0) + value / len(done)
    if steps and "prefix_rows" in steps[0].sums:
        metrics |= prefix_metrics(steps)
    if steps and "mismatch_tokens" in steps[0].sums:
        metrics |= mismatch_metrics(steps[0].sums)
    if steps and "mismatch_tokens_0" in steps[0].sums:
        metrics |= staleness_metrics(steps[0].sums)
    return metrics


def prefix_metrics(steps: list[StepSums]) -> dict[str, float]:
    """Returns the tokens of the rows for each token that went through the model, and how often a distinct one did: 1 where each
    was computed once, more where rows with a common prefix were in several passes or on several ranks' own passes."""
    rows, distinct, computed = (sum(step.sums[f"prefix_{name}"] for step in steps) for name in ("rows", "distinct", "computed"))
    return {"perf/prefix_token_ratio": rows / max(computed, 1.0), "perf/prefix_recomputed": computed / max(distinct, 1.0)}


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
        return value_metrics(list(steps))

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


def flow_loss(outputs: ForwardOutputs, micro: Rows, denominators: Denominators) -> LossOutput:
    """Returns the squared error of the velocities of a flow, averaged over all numbers of the step's actions."""
    assert outputs.flow_errors is not None
    return LossOutput(loss=aggregate(outputs.flow_errors, micro["response_mask"], "token-mean", denominators))


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
) -> Iterator[StepSums]:
    """Takes one optimizer step for each mini-batch of each epoch, and yields it.  units: what the denominators count.

    A mini-batch without a token to learn from takes no step, because the optimizer's momentum and decay would move the
    weights.
    """
    for mini in mini_batches(rows, num_mini_batches, epochs):
        denominators = count_denominators(engine, units.mask(mini["response_mask"]), scale)
        if denominators.tokens == 0:
            continue
        sums = engine.forward_backward(mini, partial(_with_denominators, loss, denominators), outputs=outputs)
        yield StepSums(sums=sums, denominators=denominators, report=engine.optimizer_step())


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
    return {name: take_rows(column, keep) for name, column in rows.items()}


def count_denominators(engine: TrainEngine, response_mask: Tensor, scale: float) -> Denominators:
    """Counts the model's tokens and the non-empty rows of a step over all ranks."""
    local = torch.stack([response_mask.sum(), response_mask.any(dim=1).sum()]).double()
    tokens, sequences = engine.reduce(local).tolist()
    return Denominators(tokens=tokens, sequences=sequences, scale=scale)


def _with_denominators(loss: StepLoss, denominators: Denominators, outputs: ForwardOutputs, micro: Rows) -> LossOutput:
    return loss(outputs, micro, denominators)


def take_pair_step(engine: TrainEngine, rows: Rows, loss: PairLoss) -> PairStep:
    """Takes one optimizer step over interleaved rows.  Every rank calls it, also one without rows."""
    num_pairs = count_pairs(engine, rows)
    sums = engine.forward_backward(rows, partial(_with_num_pairs, loss, num_pairs), outputs=loss.outputs, rows_per_unit=PAIR)
    return PairStep(sums=sums, num_pairs=num_pairs, report=engine.optimizer_step())


@torch.no_grad()
def evaluate_pairs(engine: TrainEngine, rows: Rows, loss: PairLoss) -> dict[str, float]:
    """Returns global sums over pairs: `count`, `loss`, and the sums of the loss itself.  Every rank calls it."""
    outputs = ForwardOutputs(**engine.infer(rows, outputs=loss.outputs))
    result = loss(outputs, rows, 1.0)
    sums = {"count": real_pairs(rows).sum(), "loss": result.loss, **result.sums}
    names = sorted(sums)
    totals = engine.reduce(torch.stack([sums[name].double() for name in names]))
    return dict(zip(names, totals.tolist(), strict=True))


class PairLoss(Protocol):
    """A loss of one micro-batch of interleaved rows, given the step's number of pairs; its sums are sums over pairs.

    outputs: the outputs that the engine computes for it.
    """

    outputs: tuple[str, ...]

    def __call__(self, outputs: ForwardOutputs, micro: Rows, num_pairs: float) -> LossOutput: ...


@dataclass(slots=True, kw_only=True)
class PairStep:
    """The result of one optimizer step: its global sums over pairs, the number of pairs, and the optimizer's report."""

    sums: dict[str, float]
    num_pairs: float
    report: StepReport


class DPOLoss:
    """Any preference loss on the log-probs of whole answers.

    Columns read: response_mask, and ref_log_prob (rows,), the reference's log-probs of whole answers.  Sums: DPO's implicit
    rewards beta (log pi(y) - log pi_ref(y)) as rewards/..., and log-probs as logps/...
    """

    outputs: tuple[str, ...] = ("log_probs",)

    def __init__(self, config: DPOLossConfig) -> None:
        self.loss = PREFERENCE_LOSSES.get(config.loss_type)
        self.knobs: Any = knobs_for(PREFERENCE_LOSSES.knobs_class(config.loss_type), config, config.kwargs, where="dpo.kwargs")
        self.beta = config.beta

    def __call__(self, outputs: ForwardOutputs, micro: Rows, num_pairs: float) -> LossOutput:
        assert outputs.log_probs is not None
        chosen, rejected = split(sequence_log_probs(outputs.log_probs, micro["response_mask"]))
        ref_chosen, ref_rejected = split(micro["ref_log_prob"].to(chosen.dtype))
        inputs = PreferenceInputs(chosen=chosen, rejected=rejected, ref_chosen=ref_chosen, ref_rejected=ref_rejected)
        real = real_pairs(micro)
        loss = masked_sum(self.loss(inputs, self.knobs), real) / num_pairs
        reward_chosen, reward_rejected = (self.beta * ratio.detach() for ratio in inputs.log_ratios)
        sums = {
            **_rewards(reward_chosen, reward_rejected, real),
            "logps/chosen": masked_sum(chosen.detach(), real),
            "logps/rejected": masked_sum(rejected.detach(), real),
        }
        return LossOutput(loss=loss, sums=sums)


class RewardLoss:
    """The Bradley-Terry loss on the scores of whole answers.

    Column read if present: margin (rows,), equal in both rows of a pair.  Sums: the scores as rewards/...
    """

    outputs: tuple[str, ...] = ("scores",)

    def __call__(self, outputs: ForwardOutputs, micro: Rows, num_pairs: float) -> LossOutput:
        assert outputs.scores is not None
        chosen, rejected = split(outputs.scores)
        margin = split(micro["margin"].to(chosen.dtype))[0] if "margin" in micro else None
        real = real_pairs(micro)
        loss = masked_sum(bradley_terry(chosen, rejected, margin), real) / num_pairs
        return LossOutput(loss=loss, sums=_rewards(chosen.detach(), rejected.detach(), real))


def _rewards(chosen: Tensor, rejected: Tensor, real: Tensor) -> dict[str, Tensor]:
    """Returns sums over pairs; a tie counts as half right."""
    right = (chosen > rejected).to(chosen.dtype) + 0.5 * (chosen == rejected).to(chosen.dtype)
    values = {"chosen": chosen, "rejected": rejected, "margins": chosen - rejected, "accuracies": right}
    return {f"rewards/{name}": masked(value, real).sum() for name, value in values.items()}


def interleave(pairs: Rows) -> dict[str, Tensor]:
    """Returns columns (pairs, 2, ...) as rows 2i (chosen) and 2i + 1 (rejected), and columns (pairs,) with each entry twice."""
    return {name: column.flatten(0, 1) if column.dim() > 1 else column.repeat_interleave(PAIR) for name, column in pairs.items()}


def split(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Splits (rows,) into the chosen and the rejected answers, (pairs,) each."""
    chosen, rejected = rows.view(-1, PAIR).unbind(1)
    return chosen, rejected


def real_pairs(micro: Rows) -> Tensor:
    """Returns a boolean (pairs,), which is False for the filler rows of a rank without rows left."""
    chosen, rejected = split(micro["attention_mask"].any(dim=1))
    return chosen & rejected


def count_pairs(engine: TrainEngine, rows: Rows) -> float:
    """Counts the pairs over all ranks."""
    return float(engine.reduce(real_pairs(rows).sum().double()))


def sequence_log_probs(log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """Returns sum_t m_t log pi(y_t), (rows,) float64, because the losses read small differences of large sums."""
    return masked_sum(log_probs.double(), response_mask, dim=1)


def _with_num_pairs(loss: PairLoss, num_pairs: float, outputs: ForwardOutputs, micro: Rows) -> LossOutput:
    return loss(outputs, micro, num_pairs)
