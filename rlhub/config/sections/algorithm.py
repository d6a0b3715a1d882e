"""Section `algorithm`: the advantage estimator, and everything that shapes the reward before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.config.schema import NonNegativeFloat, PositiveFloat, PositiveInt, UnitFloat
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig


@dataclass(slots=True, kw_only=True)
class KLControlConfig:
    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: kl_coef stays; adaptive: it follows target_kl (arXiv 1909.08593)."""
    kl_coef: NonNegativeFloat = 0.001
    """Weight of the KL penalty in the reward; its start value if adaptive."""
    horizon: PositiveInt = 10000
    """Adaptive: number of samples over which the coefficient adjusts; larger is slower."""
    target_kl: PositiveFloat = 0.1
    """Adaptive: target of the KL to the reference, in nats."""


@dataclass(slots=True, kw_only=True)
class FilterGroupsConfig:
    enable: bool = False
    """Dynamic sampling (DAPO): leave out groups whose samples all have the same score, and draw further prompts until the batch
    is full. A step then reads more prompts than data.train_batch_size, so end the run by trainer.total_training_steps."""
    metric: str = "seq_reward"
    """Number by which the samples are compared: seq_reward or score (the reward), acc (right or wrong), or the scorer's own."""
    max_num_gen_batches: PositiveInt = 10
    """Largest number of generations in a step; after that the batch is filled with groups of equal scores, with a warning."""


@dataclass(slots=True, kw_only=True)
class AlgorithmConfig:
    adv_estimator: str = "gae"
    """Advantage estimator: gae (PPO, with a critic), grpo, rloo, reinforce_plus_plus and more, or one of your own from a plugin.
    An unknown name (adv_estimator=list) lists all; each is a file in rlhub/algorithms/advantages/ that has its formula, source
    and knobs for adv_kwargs."""
    gamma: UnitFloat = 1.0
    """Discount factor per token."""
    lam: UnitFloat = 1.0
    """GAE's lambda: 1 is unbiased; a smaller one trades variance for the critic's bias."""
    norm_adv_by_std_in_grpo: bool = True
    """GRPO: divide by the group's standard deviation; false is Dr. GRPO."""
    use_kl_in_reward: bool = False
    """Subtract kl_ctrl.kl_coef times the KL to the reference from each token's reward."""
    kl_penalty: str = "kl"
    """KL estimator for use_kl_in_reward: kl (k1), abs, mse (k2), low_var_kl (k3)."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    whiten_rewards: bool = False
    """Scale token-level rewards to a standard deviation of 1 over the batch and keep their mean; for PPO with a critic."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    group_filter: str | None = None
    """Function of your own, path.py:function, that sees what the samples of a prompt scored and returns whether they may train.
    As with filter_groups, further prompts take the place of those that may not (rlhub/data/README.md)."""
    adv_kwargs: dict[str, Any] = field(default_factory=dict)
    """Knobs of the chosen estimator, by its own names; the estimator's own class checks them."""

    @property
    def filtering(self) -> str | None:
        """The setting by which some groups do not train; None where all do."""
        if self.filter_groups.enable:
            return "algorithm.filter_groups.enable=true"
        return None if self.group_filter is None else f"algorithm.group_filter={self.group_filter}"
