"""The KL to the reference: its estimators, and the penalty in the reward with the controller of its coefficient.

Estimators of KL(pi, reference) are those from samples of pi (Schulman 2020, "Approximating KL divergence"), with straight-through
variants whose gradient is right when used as a loss.

With d = log pi - log ref, element by element, any shape:
k1 = d; absolute = |d|; k2 = d^2 / 2; k3 = exp(-d) + d - 1.  As a LOSS, k1 has zero expected gradient and k3 is biased when
samples are off-policy; the straight-through variants ("+") keep the estimator's value and take k2's gradient, which is that
of the true KL in expectation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from rlhub.algorithms.masked import LOG_RATIO_BOUND, masked
from rlhub.config.sections.algorithm import KLControlConfig

K3_BOUND = 10.0  # one token with a huge ratio must not drown the batch
CONTROL_ERROR_BOUND = 0.2  # Ziegler et al. 2019: the clip of the proportional error


def k1(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns d, which is unbiased and may be negative."""
    return log_probs - reference


def absolute(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns |d|."""
    return (log_probs - reference).abs()


def k2(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns d^2 / 2, of low variance and biased; its gradient is that of the true KL in expectation."""
    return (log_probs - reference).square() / 2


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns exp(x) - 1 - x with x = clamp(-d, +-20), at most 10: unbiased but for the clamps, never negative.

    The gradient in x is exp(x) - 1, 0 beyond the clamps.  It is given as that number: near the reference the difference of exp(x)
    and 1 would round to anything, in the value below 0 and in its derivative to 0.
    """
    x = (reference - log_probs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    slope = x.detach().expm1()
    value = (slope - x.detach()).clamp(min=0)
    return torch.where(value <= K3_BOUND, value + (x - x.detach()) * slope, K3_BOUND)


def _straight_through(base: Callable[[Tensor, Tensor], Tensor], log_probs: Tensor, reference: Tensor) -> Tensor:
    gradient = k2(log_probs, reference)
    return gradient - gradient.detach() + base(log_probs, reference).detach()


def k1_straight_through(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns k1 with the gradient of k2."""
    return _straight_through(k1, log_probs, reference)


def absolute_straight_through(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns |d| with the gradient of k2."""
    return _straight_through(absolute, log_probs, reference)


def k2_straight_through(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns k2 itself."""
    return k2(log_probs, reference)


def k3_straight_through(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Returns k3 with the gradient of k2."""
    return _straight_through(k3, log_probs, reference)


class KLController(ABC):
    """Holds the coefficient beta of the KL in the reward (Ziegler et al. 2019, arXiv 1909.08593, section 2.2); `value` goes into
    checkpoints."""

    value: float

    @abstractmethod
    def update(self, current_kl: float, num_samples: int) -> None:
        """Takes the step's mean KL per sample token and its number of samples."""


class FixedKLController(KLController):
    """beta never changes."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, num_samples: int) -> None:
        """Has nothing to adapt."""


class AdaptiveKLController(KLController):
    """beta *= 1 + e n / horizon, e = clip(KL / target - 1, +-0.2), n = samples of the step."""

    def __init__(self, kl_coef: float, target_kl: float, horizon: int) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(f"kl_ctrl.target_kl and kl_ctrl.horizon must be positive, got {target_kl} and {horizon}")
        self.value, self.target, self.horizon = kl_coef, target_kl, horizon

    def update(self, current_kl: float, num_samples: int) -> None:
        error = max(-CONTROL_ERROR_BOUND, min(CONTROL_ERROR_BOUND, current_kl / self.target - 1))
        self.value *= 1 + error * num_samples / self.horizon


def build_kl_controller(config: KLControlConfig) -> KLController:
    """Returns the controller of the KL-in-reward coefficient."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    return FixedKLController(config.kl_coef)


def penalized_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, beta: float) -> Tensor:
    """Returns r_t = score_t - beta kl_t m_t; all (batch, response)."""
    return scores - beta * masked(kl, response_mask)
