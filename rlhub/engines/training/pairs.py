"""The updates on preference pairs: the losses on an engine's outputs, the optimizer step, and its evaluation.

A pair is two neighbouring rows: 2i is the chosen answer, 2i + 1 the rejected one.  Engines cut micro-batches in whole pairs, and
a loss is divided by the number of pairs over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhub.algorithms.masked import masked, masked_sum
from rlhub.algorithms.preference import PreferenceInputs, bradley_terry
from rlhub.algorithms.registry import PREFERENCE_LOSSES
from rlhub.config.sections.preference import DPOLossConfig
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows, StepReport, TrainEngine
from rlhub.registry import knobs_for

PAIR = 2  # rows of a preference pair


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
