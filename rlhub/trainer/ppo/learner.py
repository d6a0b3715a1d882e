"""One learning step from a rollout batch: the part that reads like the paper, shared by every schedule.

reward -> log-probs (old, reference) -> values -> advantages -> update critic -> update actor.  What is computed follows from
what the chosen algorithm requires; no algorithm and no backend is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rlhub.algorithms.inputs import AdvantageInputs
from rlhub.algorithms.kl_control import AdaptiveKLController, FixedKLController, KLController, penalized_rewards
from rlhub.algorithms.knobs import knobs_for
from rlhub.algorithms.masked import masked, masked_mean
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS
from rlhub.algorithms.rewards import whiten_rewards
from rlhub.config.sections.algorithm import KLControlConfig
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import RewardError
from rlhub.protocol import DataProto, DataProtoFuture
from rlhub.rewards import RewardManager
from rlhub.single_controller import WorkerGroup
from rlhub.trainer.ppo.columns import log_prob_inputs, model_inputs, policy_inputs, value_inputs
from rlhub.trainer.ppo.correction import bypass, correct_batch, measure_mismatch
from rlhub.trainer.ppo.layout import arrange
from rlhub.trainer.ppo.metrics import batch_metrics, mean_metrics
from rlhub.trainer.ppo.mismatch_bound import MismatchBound, mismatch_bound
from rlhub.trainer.ppo.requirements import Requirements, requirements
from rlhub.trainer.ppo.scoring import COMPONENT, Scorer, build_scorer
from rlhub.trainer.ppo.selection import number_samples, select_tokens
from rlhub.utils.timing import PhaseTimer


def build_kl_controller(config: KLControlConfig) -> KLController:
    """The controller of the KL-in-reward coefficient."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    return FixedKLController(config.kl_coef)


@dataclass(slots=True)
class Learner:
    """`learn(batch)` changes the policy (and the critic) once; `metrics` holds that step's measurements."""

    config: PPOConfig
    actor: WorkerGroup
    reference: WorkerGroup
    critic: WorkerGroup | None
    reward: RewardManager
    timers: PhaseTimer
    kl_controller: KLController = field(init=False)
    needs: Requirements = field(init=False)
    scorer: Scorer = field(init=False)
    bound: MismatchBound = field(init=False)
    metrics: dict[str, float] = field(init=False, default_factory=dict)
    _estimator: Any = field(init=False)
    _knobs: Any = field(init=False)

    def __post_init__(self) -> None:
        algorithm = self.config.algorithm
        self.needs = requirements(self.config)
        self.bound = mismatch_bound(self.config)
        self.scorer = build_scorer(self.config, self.reward, self.timers)
        self.kl_controller = build_kl_controller(algorithm.kl_ctrl)
        self._estimator = ADVANTAGE_ESTIMATORS.get(algorithm.adv_estimator)
        knobs_class = ADVANTAGE_ESTIMATORS.knobs_class(algorithm.adv_estimator)
        self._knobs = knobs_for(knobs_class, algorithm, algorithm.adv_kwargs, where="algorithm.adv_kwargs")

    def learn(self, batch: DataProto, step: int) -> dict[str, float]:
        """Train on one rollout batch; `step` counts from 1.  The batch is reordered and gains columns."""
        self.metrics = self.scorer(batch)
        self.arrange(batch, step)
        self.join(batch, self.passes(batch))
        self.estimate_advantages(batch)
        updates = [self.critic.update_critic.submit(value_inputs(batch))] if self.critic is not None else []
        if step > self.config.trainer.critic_warmup:
            self.correct(batch, step)
            inputs = policy_inputs(batch, rollout_log_probs=self.needs.rollout_log_probs)
            updates.append(self.actor.update_actor.submit(inputs))
        self.record(updates)
        return self.metrics

    def passes(self, batch: DataProto) -> list[DataProtoFuture]:
        """The forward passes before the update: log-probs (old, reference) and values.  They do not wait for each other, so on
        separate pools they run at the same time."""
        passes = []
        if self.needs.old_log_probs:
            inputs = log_prob_inputs(batch, sum_pi_squared=self.needs.sum_pi_squared)
            passes.append(self.actor.compute_log_prob.submit(inputs))
        if self.needs.reference:
            passes.append(self.reference.compute_ref_log_prob.submit(model_inputs(batch)))
        if self.critic is not None:
            passes.append(self.critic.compute_values.submit(model_inputs(batch)))
        return passes

    def join(self, batch: DataProto, passes: Sequence[DataProtoFuture]) -> None:
        """Adds the columns of the forward passes to the batch."""
        for passed in passes:
            output = passed.get()
            self.metrics |= mean_metrics(output.meta_info.pop("metrics", {}))
            batch.union(output)
        if self.needs.old_log_probs:
            self.metrics |= measure_mismatch(batch)
            self.bound.check(self.metrics)
        elif self.needs.bypass:
            bypass(batch)

    def correct(self, batch: DataProto, step: int) -> None:
        """Adds what the policy's loss reads of the rollout correction and of a choice of tokens."""
        self.metrics |= correct_batch(batch, self.config.algorithm.rollout_correction)
        if self.needs.selection:
            batch.batch["selected"] = select_tokens(batch, self.config, step)

    def record(self, updates: Sequence[DataProtoFuture]) -> None:
        """Wait for the updates and keep the metrics they return."""
        for update in updates:
            self.metrics |= mean_metrics(update.get().meta_info["metrics"])
        if not self.needs.old_log_probs:  # the update has measured the mismatch
            self.bound.check(self.metrics)

    def arrange(self, batch: DataProto, step: int) -> None:
        """Fix the mini-batches and deal the rows to the ranks, so that each rank of the actor and of the critic has its part of
        every mini-batch."""
        actor, num_samples = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout.n
        critic_ranks = self.critic.mesh("critic").dp_size if self.critic is not None else 1
        number_samples(batch)
        arrange(
            batch,
            rows_per_mini_batch=actor.ppo_mini_batch_size * num_samples,
            num_ranks=math.lcm(self.actor.mesh("actor").dp_size, critic_ranks),
            balance=self.config.trainer.balance_batch,
            shuffle_seed=self.config.trainer.seed * 1_000_003 + step if actor.shuffle else None,
            critic_rows_per_mini_batch=(self.config.critic.ppo_mini_batch_size or actor.ppo_mini_batch_size) * num_samples
            if self.critic is not None
            else None,
        )

    def estimate_advantages(self, batch: DataProto) -> None:
        """Adds token_level_rewards, advantages and returns (rows, response).  Rows that must not train leave response_mask:
        samples without a valid score, or without a token of the model's to put it on, before the estimator; truncated ones (if
        asked) after it, since their reward counts."""
        columns = batch.batch
        columns["valid"] = columns["valid"] & columns["response_mask"].bool().any(1)
        columns["token_level_rewards"] = self.penalize(batch)
        columns["response_mask"] = columns["response_mask"] * columns["valid"][:, None].long()
        if self.config.algorithm.whiten_rewards:
            columns["token_level_rewards"] = whiten_rewards(columns["token_level_rewards"], columns["response_mask"])
        with self.timers.measure("advantages"):
            outputs = self._estimator(
                AdvantageInputs(
                    token_level_rewards=columns["token_level_rewards"],
                    response_mask=columns["response_mask"],
                    group=own_group_when_invalid(columns["uid"], columns["valid"]),
                    values=columns["values"] if self.critic is not None else None,
                    old_log_probs=columns["old_log_probs"] if self.needs.old_log_probs or self.needs.bypass else None,
                    sum_pi_squared=columns["sum_pi_squared"] if self.needs.sum_pi_squared else None,
                    baseline_rewards=columns["baseline_rewards"] if self.needs.baseline_rewards else None,
                    reward_components=reward_components(batch) if self.needs.reward_components else None,
                ),
                self._knobs,
            )
        columns["advantages"], columns["returns"] = outputs.advantages, outputs.returns
        self.metrics |= outputs.metrics | batch_metrics(batch)
        check_advantages(batch, self.metrics)
        if self.config.actor_rollout_ref.actor.mask_truncated:
            columns["response_mask"] = columns["response_mask"] * (columns["finish_reason"] == 0)[:, None].long()
        self.metrics["actor/masked_samples"] = float((~columns["response_mask"].any(1)).sum().item())

    def penalize(self, batch: DataProto) -> torch.Tensor:
        """token_level_scores, less beta times the KL to the reference where the reward carries it."""
        columns, algorithm = batch.batch, self.config.algorithm
        if not algorithm.use_kl_in_reward:
            return columns["token_level_scores"]
        mask = columns["response_mask"]
        kl = KL_ESTIMATORS.get(algorithm.kl_penalty)(columns["old_log_probs"], columns["ref_log_prob"])
        rewards = penalized_rewards(columns["token_level_scores"], kl, mask, self.kl_controller.value)
        mean_kl = masked_mean(masked_mean(kl, mask, dim=1), mask.any(1)).item()
        self.metrics |= {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": self.kl_controller.value}
        self.kl_controller.update(mean_kl, len(batch))
        return rewards


def reward_components(batch: DataProto) -> dict[str, torch.Tensor]:
    """The scorer's own numbers by name, (rows,) float64: columns `reward/<name>` of the batch."""
    return {name.removeprefix(COMPONENT): column for name, column in batch.batch.items() if name.startswith(COMPONENT)}


def check_advantages(batch: DataProto, metrics: Mapping[str, float]) -> None:
    """RewardError where rewards are too large for advantages in float32.  What a model's own numbers (values, log-probs) have
    spoilt is left to the update, which skips a step that is not finite."""
    ends = [f"critic/{name}/{end}" for name in ("advantages", "returns") for end in ("max", "min")]
    if all(math.isfinite(metrics.get(end, 0.0)) for end in ends):
        return
    columns = batch.batch
    made = [columns[name] for name in ("values", "old_log_probs", "ref_log_prob") if name in columns.keys()]
    bad = columns["response_mask"].bool() & ~(columns["advantages"].isfinite() & columns["returns"].isfinite())
    if bad.any() and all(bool(masked(column, columns["response_mask"]).isfinite().all()) for column in made):
        row = int(bad.any(1).nonzero()[0])
        scores = columns["scores"]
        raise RewardError(
            f"row {row}: with a reward of {float(scores[row]):g}, in a batch whose rewards reach {float(scores.abs().max()):g}, "
            "its advantages are not finite in float32, whose largest number is 3.4e+38. Scale the rewards down"
        )


def own_group_when_invalid(uid: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Group ids (rows,), where a sample without a valid score is a group of its own and moves nobody's baseline."""
    return torch.where(valid, uid, -1 - torch.arange(len(uid)))
