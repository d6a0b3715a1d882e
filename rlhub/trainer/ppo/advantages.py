"""From scores to advantages: the KL penalty and whitening of token rewards, the estimator, and which rows may train.

All of it is the algorithms' own functions (rlhub.algorithms) over the columns of one training batch, on the driver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhub.algorithms.inputs import AdvantageInputs
from rlhub.algorithms.kl import AdaptiveKLController, FixedKLController, KLController, penalized_rewards
from rlhub.algorithms.masked import masked, masked_mean
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS
from rlhub.algorithms.returns import whiten_rewards
from rlhub.config.sections.algorithm import KLControlConfig
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import RewardError
from rlhub.protocol import DataProto
from rlhub.registry import knobs_for
from rlhub.trainer.ppo.metrics import batch_metrics
from rlhub.trainer.ppo.requirements import Requirements
from rlhub.trainer.ppo.scoring import COMPONENT
from rlhub.utils.timing import PhaseTimer


def build_kl_controller(config: KLControlConfig) -> KLController:
    """Returns the controller of the KL-in-reward coefficient."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    return FixedKLController(config.kl_coef)


@dataclass(slots=True)
class AdvantageEstimation:
    """The chosen estimator with its knobs, and the coefficient of the KL in the reward, which moves from step to step."""

    config: PPOConfig
    needs: Requirements
    timers: PhaseTimer
    kl_controller: KLController = field(init=False)
    _estimator: Any = field(init=False)
    _knobs: Any = field(init=False)

    def __post_init__(self) -> None:
        algorithm = self.config.algorithm
        self.kl_controller = build_kl_controller(algorithm.kl_ctrl)
        self._estimator = ADVANTAGE_ESTIMATORS.get(algorithm.adv_estimator)
        knobs_class = ADVANTAGE_ESTIMATORS.knobs_class(algorithm.adv_estimator)
        self._knobs = knobs_for(knobs_class, algorithm, algorithm.adv_kwargs, where="algorithm.adv_kwargs")

    def __call__(self, batch: DataProto) -> dict[str, float]:
        """Adds token_level_rewards, advantages and returns (rows, response), and returns the metrics of the batch.

        Rows that must not train leave response_mask: samples without a valid score, or without a token of the model's to put it
        on, before the estimator; truncated ones (if asked) after it, since their reward counts.
        """
        columns, algorithm = batch.batch, self.config.algorithm
        columns["valid"] = columns["valid"] & columns["response_mask"].bool().any(1)
        columns["token_level_rewards"], metrics = self._penalize(batch)
        columns["response_mask"] = columns["response_mask"] * columns["valid"][:, None].long()
        if algorithm.whiten_rewards:
            columns["token_level_rewards"] = whiten_rewards(columns["token_level_rewards"], columns["response_mask"])
        with self.timers.measure("advantages"):
            outputs = self._estimator(self._inputs(batch), self._knobs)
        columns["advantages"], columns["returns"] = outputs.advantages, outputs.returns
        metrics |= outputs.metrics | batch_metrics(batch)
        check_advantages(batch, metrics)
        if self.config.actor_rollout_ref.actor.mask_truncated:
            columns["response_mask"] = columns["response_mask"] * (columns["finish_reason"] == 0)[:, None].long()
        metrics["actor/masked_samples"] = float((~columns["response_mask"].any(1)).sum().item())
        return metrics

    def _inputs(self, batch: DataProto) -> AdvantageInputs:
        """Returns what the estimator reads; what it does not require is None."""
        columns, needs = batch.batch, self.needs
        return AdvantageInputs(
            token_level_rewards=columns["token_level_rewards"],
            response_mask=columns["response_mask"],
            group=own_group_when_invalid(columns["uid"], columns["valid"]),
            values=columns["values"] if needs.values else None,
            old_log_probs=columns["old_log_probs"] if needs.old_log_probs or needs.bypass else None,
            sum_pi_squared=columns["sum_pi_squared"] if needs.sum_pi_squared else None,
            baseline_rewards=columns["baseline_rewards"] if needs.baseline_rewards else None,
            reward_components=reward_components(batch) if needs.reward_components else None,
        )

    def _penalize(self, batch: DataProto) -> tuple[Tensor, dict[str, float]]:
        """Returns token_level_scores, less beta times the KL to the reference where the reward carries it, and its metrics."""
        columns, algorithm = batch.batch, self.config.algorithm
        if not algorithm.use_kl_in_reward:
            return columns["token_level_scores"], {}
        mask = columns["response_mask"]
        kl = KL_ESTIMATORS.get(algorithm.kl_penalty)(columns["old_log_probs"], columns["ref_log_prob"])
        rewards = penalized_rewards(columns["token_level_scores"], kl, mask, self.kl_controller.value)
        mean_kl = masked_mean(masked_mean(kl, mask, dim=1), mask.any(1)).item()
        metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": self.kl_controller.value}
        self.kl_controller.update(mean_kl, len(batch))
        return rewards, metrics


def reward_components(batch: DataProto) -> dict[str, Tensor]:
    """Returns the scorer's own numbers by name, (rows,) float64: columns `reward/<name>` of the batch."""
    return {name.removeprefix(COMPONENT): column for name, column in batch.batch.items() if name.startswith(COMPONENT)}


def check_advantages(batch: DataProto, metrics: Mapping[str, float]) -> None:
    """Raises RewardError where rewards are too large for advantages in float32.  What a model's own numbers (values, log-probs)
    have spoilt is left to the update, which skips a step that is not finite."""
    ends = [f"critic/{name}/{end}" for name in ("advantages", "returns") for end in ("max", "min")]
    if all(math.isfinite(metrics.get(end, 0.0)) for end in ends):
        return
    columns = batch.batch
    predicted = [columns[name] for name in ("values", "old_log_probs", "ref_log_prob") if name in columns.keys()]
    bad = columns["response_mask"].bool() & ~(columns["advantages"].isfinite() & columns["returns"].isfinite())
    if bad.any() and all(bool(masked(column, columns["response_mask"]).isfinite().all()) for column in predicted):
        row = int(bad.any(1).nonzero()[0])
        scores = columns["scores"]
        raise RewardError(
            f"row {row}: with a reward of {float(scores[row]):g}, in a batch whose rewards reach {float(scores.abs().max()):g}, "
            "its advantages are not finite in float32, whose largest number is 3.4e+38. Scale the rewards down"
        )


def own_group_when_invalid(uid: Tensor, valid: Tensor) -> Tensor:
    """Returns group ids (rows,), where a sample without a valid score is a group of its own and moves nobody's baseline."""
    return torch.where(valid, uid, -1 - torch.arange(len(uid)))
