"""The requirements of the chosen algorithm, read from its registry rows and settings; no algorithm is named here."""

from __future__ import annotations

from dataclasses import dataclass

from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from rlhub.config.rules.asynchronous import may_be_stale
from rlhub.config.rules.checks import check_requirements
from rlhub.config.rules.placement import reads_reference, unneeded
from rlhub.config.rules.sources import estimators_of
from rlhub.config.sections.ppo import PPOConfig
from rlhub.registry import suggest

NAMES_OF_THE_REWARD = ("seq_reward", "seq_final_reward", "reward", "score")
"""Names by which algorithm.filter_groups.metric may call the reward itself."""
OWN_NUMBERS = ("acc", "overlong", "overlong_reward", "function", "model", "judge")
"""Further numbers of a sample that exist without a reward function of the user's own; some of them by some settings only."""

OF_ALL_ROWS = {
    "values": "a critic, which learns from the returns of all rows",
    "baseline_rewards": "a greedy response to every prompt, without which a row does not train",
}
"""Requirements of estimators that cannot hold for the rows of some data sources only."""


@dataclass(slots=True, kw_only=True)
class Requirements:
    """Says what the training step computes.

    values: a critic predicts them; own_values: the policy itself does, in its pass before the update.  reference: log-probs of
    the frozen reference are read.  old_log_probs: the policy has a forward pass of its own before the update;
    sum_pi_squared: which also gives that.  bypass: the rollout's log-probs stand in for the old ones.  groups: several samples
    per prompt.  baseline_rewards: a greedy response per prompt is scored.  reward_components: the scorer's own numbers are read.
    rollout_log_probs: the update reads them.  correction: tokens are weighted or rejected before the update; staleness: or in
    it, by how old they are.  selection: the loss chooses tokens from the whole mini-batch.
    """

    values: bool
    own_values: bool
    reference: bool
    old_log_probs: bool
    bypass: bool
    sum_pi_squared: bool
    groups: bool
    baseline_rewards: bool
    reward_components: bool
    rollout_log_probs: bool
    correction: bool
    staleness: bool
    selection: bool


def num_mini_batches(config: PPOConfig) -> int:
    """Returns the optimizer steps per epoch over one training batch."""
    return config.data.train_batch_size // config.actor_rollout_ref.actor.ppo_mini_batch_size


def critic_mini_batches(config: PPOConfig) -> int:
    """Returns the critic's optimizer steps per epoch over one training batch."""
    size = config.critic.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
    return -(-config.data.train_batch_size // size)


def required(config: PPOConfig) -> frozenset[str]:
    """Returns what the advantage estimators of the run and of its data sources require, by the words of their registry rows."""
    names = [own.adv_estimator for own in estimators_of(config).values()]
    return frozenset().union(*(ADVANTAGE_ESTIMATORS.row(name).requires for name in names))


def requirements(config: PPOConfig) -> Requirements:
    """Returns the passes this run needs.

    The old log-probs' own pass is skipped when the update's first forward pass is that very policy: one optimizer step per
    batch, one epoch, no KL in the reward, no estimator or loss that reads them and no rollout correction, which compares them
    with the rollout's.  A batch that may hold tokens of older policies always has it: the policy that the loss clips against
    is the current one before the update, never the one that sampled (decoupled PPO, Fu et al. 2025, arXiv 2505.24298).  The
    pass is also skipped where the rollout's log-probs stand in for them (bypass), and where the loss's proximal policy is made
    from others, unless the advantages read them.
    """
    loss = POLICY_LOSSES.row(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    needs = required(config) | loss.requires
    actor, in_reward = config.actor_rollout_ref.actor, config.algorithm.use_kl_in_reward
    correction = config.algorithm.rollout_correction
    several_steps = num_mini_batches(config) > 1 or actor.ppo_epochs > 1
    own_values = "values" in needs and bool(config.actor_rollout_ref.model.vla.get("value_head"))
    in_advantages = in_reward or own_values or not needs.isdisjoint({"old_log_probs", "sum_pi_squared"})
    in_loss = not correction.in_update and (several_steps or correction.active or may_be_stale(config))
    return Requirements(
        values="values" in needs and not own_values,
        own_values=own_values,
        reference=reads_reference(config, needs),
        old_log_probs=not correction.bypass_mode and (in_advantages or in_loss),
        bypass=correction.bypass_mode,
        sum_pi_squared="sum_pi_squared" in needs,
        groups="groups" in needs,
        baseline_rewards="baseline_rewards" in needs,
        reward_components="reward_components" in needs,
        rollout_log_probs="rollout_log_probs" in needs or (correction.in_update and not correction.bypass_mode),
        correction=correction.active and not correction.in_update,
        staleness=correction.in_update,
        selection="select" in loss.companions,
    )


def estimators_known(config: PPOConfig) -> bool:
    """Returns whether all chosen advantage estimators are registered."""
    return all(own.adv_estimator in ADVANTAGE_ESTIMATORS for own in estimators_of(config).values())


def check_estimators(config: PPOConfig) -> list[str]:
    """Returns the problems of settings that the advantage estimators of the run and of its data sources need."""
    found, general = [], ADVANTAGE_ESTIMATORS.row(config.algorithm.adv_estimator)
    for key, own in estimators_of(config).items():
        requires, estimator = ADVANTAGE_ESTIMATORS.row(own.adv_estimator).requires, f"{key}.adv_estimator={own.adv_estimator}"
        found += check_requirements(config, requires, estimator)
        for word, needed in OF_ALL_ROWS.items():
            if (word in requires) != (word in general.requires):
                both = f"{estimator} with algorithm.adv_estimator={general.name}"
                one = own.adv_estimator if word in requires else general.name
                found.append(f"{both}: {one} needs {needed}; choose estimators that all need it, or none that does")
    return [*dict.fromkeys(found), *unneeded(config, required(config))]


def check_group_metric(config: PPOConfig) -> list[str]:
    """Returns the problem with the number by which groups are to be compared, where it can be known before the first scoring:
    what the user's own reward function, or a plugin, returns cannot."""
    groups = config.algorithm.filter_groups
    known = (*NAMES_OF_THE_REWARD, *OWN_NUMBERS)
    if not config.algorithm.filtering or groups.metric in known or config.custom_reward_function.path or config.trainer.plugins:
        return []
    return [
        f"algorithm.filter_groups.metric={groups.metric}: the scorers that come with rlhub give no such number"
        f"{suggest(groups.metric, known)}; known: seq_reward (the reward itself), acc. A number of your own is an entry of the "
        "dict that your reward function returns (custom_reward_function.path)"
    ]
