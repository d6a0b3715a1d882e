"""What the chosen algorithm needs, asked of its registry rows and settings; nothing here names an algorithm."""

from __future__ import annotations

from dataclasses import dataclass

from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS
from rlhub.config.ppo import PPOConfig


@dataclass(slots=True, kw_only=True)
class Requirements:
    """values: a critic predicts them.  reference: log-probs of the frozen starting policy are read.  old_log_probs: a forward
    pass of its own before the update.  groups: several samples per prompt."""

    values: bool
    reference: bool
    old_log_probs: bool
    groups: bool


def num_mini_batches(config: PPOConfig) -> int:
    """Optimizer steps per epoch over one training batch."""
    return config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size


def critic_mini_batches(config: PPOConfig) -> int:
    """The critic's optimizer steps per epoch over one training batch."""
    size = config.critic.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
    return -(-config.data.train_batch_size // size)


def requirements(config: PPOConfig) -> Requirements:
    """The passes this run needs.

    The old log-probs' own pass is skipped when the update's first forward pass is that very policy: one optimizer step per
    batch, one epoch, no KL in the reward and no estimator that reads them.
    """
    needs = ADVANTAGE_ESTIMATORS.row(config.algorithm.adv_estimator).requires
    actor, in_reward = config.actor_rollout_ref.actor, config.algorithm.use_kl_in_reward
    several_steps = num_mini_batches(config) > 1 or actor.ppo_epochs > 1
    return Requirements(
        values="values" in needs,
        reference=actor.use_kl_loss or in_reward,
        old_log_probs=several_steps or in_reward or "old_log_probs" in needs,
        groups="groups" in needs,
    )
