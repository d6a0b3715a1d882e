"""Estimators of KL(pi, reference) from samples of pi (Schulman 2020, "Approximating KL divergence"), and straight-through
variants whose gradient is right when used as a loss.

With d = log pi - log ref, element by element, any shape:
k1 = d; absolute = |d|; k2 = d^2 / 2; k3 = exp(-d) + d - 1.  As a LOSS, k1 has zero expected gradient and k3 is biased when
samples are off-policy; the straight-through variants ("+") keep the estimator's value and take k2's gradient, which is that
of the true KL in expectation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # exp(20) is finite in float32
K3_BOUND = 10.0  # one token with a huge ratio must not drown the batch


def k1(log_probs: Tensor, reference: Tensor) -> Tensor:
    """d, unbiased, may be negative."""
    return log_probs - reference


def absolute(log_probs: Tensor, reference: Tensor) -> Tensor:
    """|d|."""
    return (log_probs - reference).abs()


def k2(log_probs: Tensor, reference: Tensor) -> Tensor:
    """d^2 / 2, low variance, biased; its gradient is that of the true KL in expectation."""
    return (log_probs - reference).square() / 2


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """exp(x) - 1 - x with x = clamp(-d, +-20), at most 10: unbiased but for the clamps, never negative.

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
    """Value of k1, gradient of k2."""
    return _straight_through(k1, log_probs, reference)


def absolute_straight_through(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Value of |d|, gradient of k2."""
    return _straight_through(absolute, log_probs, reference)


def k2_straight_through(log_probs: Tensor, reference: Tensor) -> Tensor:
    """k2 itself."""
    return k2(log_probs, reference)


def k3_straight_through(log_probs: Tensor, reference: Tensor) -> Tensor:
    """Value of k3, gradient of k2."""
    return _straight_through(k3, log_probs, reference)
