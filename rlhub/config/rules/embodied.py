"""The rules of training in simulators (section `env`)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from rlhub.config.rules import placement
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.vla import FLOW

_ROLLOUT = "actor_rollout_ref.rollout"


def derive_envs(config: PPOConfig) -> None:
    """Derives the number of environments of a rank: one for each of its training episodes."""
    if config.env.name is not None and config.env.num_envs is None:
        episodes = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        config.env.num_envs = max(-(-episodes // _rollout_ranks(config)), config.env.stages)


def evaluate_envs(config: PPOConfig) -> None:
    """Lowers the number of environments of a rank to that of its validation episodes; those on a pool of their own stay."""
    env, episodes = config.env, config.env.val_scenes * config.actor_rollout_ref.rollout.val_kwargs.n
    assert env.num_envs is not None, "derive first"
    if placement.pool_name(config.trainer, placement.ENVIRONMENTS) == placement.MAIN:
        env.num_envs = max(min(env.num_envs, -(-episodes // _rollout_ranks(config))), env.stages)


def _rollout_ranks(config: PPOConfig) -> int:
    """Returns the ranks that have simulators."""
    pool = placement.pool_of(config.trainer, "rollout")
    return pool.nnodes * pool.n_gpus_per_node


def problems(config: PPOConfig) -> list[str]:
    """Returns the problems of settings that do not fit together; [] without simulators."""
    env, scoring = config.env, config.reward_model
    if config.actor_rollout_ref.model.vla.get("decoding") == FLOW:
        key = "actor_rollout_ref.model.vla.decoding=flow"
        return [f"{key}: PI0 gives no log-probs of its actions, which policy gradients need; clone it with main_sft"]
    if env.name is None:
        return []
    policy, given, ranks = config.actor_rollout_ref.model, f"env.name={env.name}", _rollout_ranks(config)
    assert env.num_envs is not None, "derive first"
    refused = {
        f"needs a policy of actions: set actor_rollout_ref.model.vla and {_ROLLOUT}.name=hf": not policy.vla,
        "reads no prompts: leave data.train_files and data.val_files out, or set env.name=null": bool(
            config.data.train_files or config.data.val_files
        ),
        "gives the rewards itself: set reward_model.enable=false, and no judge or custom_reward_function": bool(
            scoring.enable or scoring.judge.model.path or config.custom_reward_function.path
        ),
        f"does not filter groups: leave out {config.algorithm.filtering}": config.algorithm.filtering is not None,
        "records no batches: set trainer.record_batches=false and trainer.replay_from=null": bool(
            config.trainer.record_batches or config.trainer.replay_from
        ),
        f"env.val_scenes={env.val_scenes} is less than the {ranks} ranks that have simulators; set 0 or at least {ranks}": (
            0 < env.val_scenes < ranks
        ),
        f"env.stages={env.stages} is more than env.num_envs={env.num_envs} of a rank": env.stages > env.num_envs,
        **_self_referential(config),
    }
    return [*(f"{given}: {text}" for text, holds in refused.items() if holds), *_apart(config)]


def _self_referential(config: PPOConfig) -> dict[str, bool]:
    """Returns what forbids to compare failures with successes, and whether it does."""
    env, samples = config.env, config.actor_rollout_ref.rollout.n
    alone = samples == 1 and env.scenes == "seeds" and env.srpo.task == "scene"
    given = "env.reward=srpo"
    return {
        f"{given} with env.srpo.encoder=vjepa2 needs the folder of a V-JEPA 2 model: set env.srpo.path": (
            env.reward == "srpo" and env.srpo.encoder == "vjepa2" and not env.srpo.path
        ),
        f"{given} compares episodes of the same scene, but each has one and comes once: set {_ROLLOUT}.n above 1, "
        "env.scenes=fixed or env.srpo.task=instruction": env.reward == "srpo" and alone,
    }


def _apart(config: PPOConfig) -> Iterator[str]:
    """Yields the problems of simulators on a pool of their own."""
    trainer, env = config.trainer, config.env
    name = placement.pool_name(trainer, placement.ENVIRONMENTS)
    if name == placement.MAIN:
        return
    given, size = f"trainer.placement.environments={name}", f"trainer.pools.{name}"
    pool, ranks, num_envs = placement.pool_of(trainer, placement.ENVIRONMENTS), _rollout_ranks(config), env.num_envs
    processes = pool.ranks
    assert num_envs is not None, "derive first"
    for role, other in trainer.placement.items():
        if other == name and role != placement.ENVIRONMENTS:
            yield f"{given}, but trainer.placement.{role}={name} too: simulators have a pool of their own; give {role} another"
    if trainer.controller == "multi":
        yield f"{given} with trainer.controller=multi: the ranks of a pool would run the loop; set trainer.controller=single"
    if processes % (ranks * env.stages):
        share, rest = divmod(processes, ranks * env.stages)
        yield (
            f"{size}: its {processes} processes must be shared by {ranks} rollout ranks x env.stages={env.stages}: {processes} = "
            f"{ranks * env.stages} x {share} + {rest}; set nnodes x n_gpus_per_node to a multiple of {ranks * env.stages}"
        )
    elif num_envs // env.stages < (share := processes // (ranks * env.stages)):
        yield (
            f"{size}: a stage has {share} processes, but env.num_envs={num_envs} / env.stages={env.stages} = "
            f"{num_envs // env.stages} environments; each process needs one: set env.num_envs to at least {share * env.stages}"
        )
    if pool.process_gpus > 1 and pool.process_gpus % 1:
        whole = int(pool.process_gpus)
        yield f"{size}.process_gpus={pool.process_gpus:g}: Ray gives parts of one GPU or whole ones; set {whole} or {whole + 1}"


def requirement_problems(config: PPOConfig, requires: AbstractSet[str], estimator: str = "") -> list[str]:
    """Returns the problems with what an advantage estimator needs.  requires: of its registry row.  estimator: its name with the
    key that sets it, where it is a data source's own."""
    vla, env, actor = config.actor_rollout_ref.model.vla, config.env.name, config.actor_rollout_ref.actor
    estimator = estimator or f"algorithm.adv_estimator={config.algorithm.adv_estimator}"
    if env is None and "episodes" in requires:
        return [f"{estimator} needs the episodes of simulators: set env.name"]
    if env is not None and "episodes" not in requires:
        known = "set chunk_gae or chunk_grpo"
        return [f"{estimator}: a row of env.name={env} is one call of an episode, not a response; {known}"]
    found = []
    if actor.value_loss_coef and (env is None or "values" not in requires):
        weight = f"actor_rollout_ref.actor.value_loss_coef={actor.value_loss_coef}"
        found.append(f"{weight} trains the policy's own values, which only chunk_gae with env.name reads; set it to 0")
    if env is not None and "values" in requires:
        if not vla.get("value_head"):
            found.append(f"{estimator} needs values: set actor_rollout_ref.model.vla.value_head=true")
        if not actor.value_loss_coef:
            found.append(f"{estimator} needs values: set actor_rollout_ref.actor.value_loss_coef above 0")
        if config.algorithm.rollout_correction.bypass_mode:
            found.append(f"{estimator} needs algorithm.rollout_correction.bypass_mode=false")
    return found
