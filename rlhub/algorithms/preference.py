"""Losses on pairs of answers to one prompt, of which people preferred the first.

Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, equation 7) with the label smoothing of its
conservative form (Mitchell 2023, "A note on DPO with noisy preferences"), IPO (Azar et al. 2023, arXiv 2310.12036,
equation 17), the hinge of SLiC-HF (Zhao et al. 2023, arXiv 2305.10425) on DPO's rewards, and Bradley-Terry for reward
models (Ouyang et al. 2022, arXiv 2203.02155, equation 1) with the margin of Llama 2 (Touvron et al. 2023, arXiv 2307.09288,
equation 2).

Log-probs of answers are SUMS over their tokens, as in the papers.  (Elsewhere IPO's are means over the tokens, which is
another objective: its target 1 / (2 beta) is then nats a token.  Nor is the conservative form the robust form of Chowdhury et
al. 2024, arXiv 2403.00409, which subtracts the flipped term and divides by 1 - 2 eps.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(slots=True, kw_only=True)
class PreferenceInputs:
    """The log-probs of both answers of each pair under the policy and under the reference, each (pairs,).

    Only chosen and rejected carry gradient.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor

    @property
    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """Returns log pi(y) - log pi_ref(y) of the chosen and the rejected answers; times beta they are DPO's implicit
        rewards."""
        return self.chosen - self.ref_chosen, self.rejected - self.ref_rejected

    @property
    def margin(self) -> Tensor:
        """Returns h = (log pi(y_w) - log pi_ref(y_w)) - (log pi(y_l) - log pi_ref(y_l)), (pairs,)."""
        won, lost = self.log_ratios
        return won - lost


def _check_beta(beta: float) -> None:
    if beta <= 0:
        raise ValueError(f"beta must be above 0 (at 0 the policy may leave the reference freely), got {beta}")


@dataclass(slots=True, kw_only=True)
class SigmoidKnobs:
    """beta: strength of the pull to the reference.  label_smoothing: probability that a label is the wrong way round."""

    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check_beta(self.beta)
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be in [0, 0.5) (at 0.5 labels say nothing), got {self.label_smoothing}")


@dataclass(slots=True, kw_only=True)
class BetaKnobs:
    """beta: strength of the pull to the reference (tau in the IPO paper)."""

    beta: float = 0.1

    def __post_init__(self) -> None:
        _check_beta(self.beta)


def dpo_sigmoid(inputs: PreferenceInputs, knobs: SigmoidKnobs) -> Tensor:
    """Returns -(1 - eps) log sigmoid(beta h) - eps log sigmoid(-beta h), (pairs,); log 2 where policy and reference agree."""
    logits = knobs.beta * inputs.margin
    return -(1 - knobs.label_smoothing) * logsigmoid(logits) - knobs.label_smoothing * logsigmoid(-logits)


def ipo(inputs: PreferenceInputs, knobs: BetaKnobs) -> Tensor:
    """Returns (h - 1 / (2 beta))^2, (pairs,): the margin is pulled to a number, so it cannot grow for ever on sure labels."""
    return (inputs.margin - 1 / (2 * knobs.beta)).square()


def hinge(inputs: PreferenceInputs, knobs: BetaKnobs) -> Tensor:
    """Returns max(0, 1 - beta h), (pairs,): pairs with margin 1 / beta are left alone."""
    return torch.relu(1 - knobs.beta * inputs.margin)


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Returns -log sigmoid(r_w - r_l - m), (pairs,), of scores (pairs,) and an optional margin (pairs,) by which to win."""
    difference = chosen - rejected
    return -logsigmoid(difference if margin is None else difference - margin)
