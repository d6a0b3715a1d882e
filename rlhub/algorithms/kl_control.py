"""KL in the reward: the penalty and the coefficient's controller (Ziegler et al. 2019, arXiv 1909.08593, section 2.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from rlhub.algorithms.masked import masked

ERROR_BOUND = 0.2  # the paper's clip of the proportional error


class KLController(ABC):
    """Holds the coefficient beta; `value` goes into checkpoints."""

    value: float

    @abstractmethod
    def update(self, current_kl: float, num_samples: int) -> None:
        """Take the step's mean KL per sample token and its number of samples."""


class FixedKLController(KLController):
    """beta never changes."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, num_samples: int) -> None:
        """Nothing to adapt."""


class AdaptiveKLController(KLController):
    """beta *= 1 + e n / horizon, e = clip(KL / target - 1, +-0.2), n = samples of the step."""

    def __init__(self, kl_coef: float, target_kl: float, horizon: int) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(f"kl_ctrl.target_kl and kl_ctrl.horizon must be positive, got {target_kl} and {horizon}")
        self.value, self.target, self.horizon = kl_coef, target_kl, horizon

    def update(self, current_kl: float, num_samples: int) -> None:
        error = max(-ERROR_BOUND, min(ERROR_BOUND, current_kl / self.target - 1))
        self.value *= 1 + error * num_samples / self.horizon


def penalized_rewards(scores: Tensor, kl: Tensor, response_mask: Tensor, beta: float) -> Tensor:
    """r_t = score_t - beta kl_t m_t; all (batch, response)."""
    return scores - beta * masked(kl, response_mask)
