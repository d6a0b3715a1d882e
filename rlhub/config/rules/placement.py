"""The pools of ranks and the roles on them: `trainer.pools` and `trainer.placement`, typed, with their rules.

The main pool (trainer.nnodes x trainer.n_gpus_per_node) has the actor and every role without a pool of its own, all in one
process per rank.  Each further pool has its own processes, one per rank, for the roles that are placed on it.  A pool of
simulators (role environments) has no ranks: its processes are actors, of which each rollout rank has an equal number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from rlhub.config.load import build
from rlhub.config.rules.parallel import ranks_per_copy
from rlhub.config.schema import NonNegativeFloat, PositiveInt
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.registry import suggest

MAIN = "main"
ENVIRONMENTS = "environments"
ROLES = ("rollout", "reference", "critic", "reward_model", "judge", ENVIRONMENTS)
"""Roles that can be placed on a pool, beside those of a pipeline of one's own.  The actor is always on the main pool."""
_ACTOR = ("actor", "actor_rollout_ref")

_POOLS, _PLACEMENT = "trainer.pools", "trainer.placement"
_EXAMPLE = f"for example {_POOLS}.generation.n_gpus_per_node=2 {_PLACEMENT}.rollout=generation"


@dataclass(slots=True, kw_only=True)
class PoolConfig:
    """One entry of trainer.pools."""

    nnodes: PositiveInt = 1
    """Number of machines."""
    n_gpus_per_node: PositiveInt = 1
    """Worker ranks per machine: GPUs, or on CPU processes; of simulators, processes."""
    process_cpus: NonNegativeFloat = 0.0
    """CPUs that each process of simulators reserves; 0 reserves none."""
    process_gpus: NonNegativeFloat = 0.0
    """GPUs that each process of simulators reserves, to simulate or render on them; 0 reserves none."""

    @property
    def ranks(self) -> int:
        return self.nnodes * self.n_gpus_per_node


def pools_of(trainer: TrainerConfig) -> dict[str, PoolConfig]:
    """Returns every pool by name, the main pool first; wrong values of an entry are replaced by their defaults."""
    assert trainer.n_gpus_per_node is not None, "derive first"
    main = PoolConfig(nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node)
    return {MAIN: main} | {name: build(PoolConfig, _entry(value), []) for name, value in trainer.pools.items() if name != MAIN}


def pools_of_ranks(trainer: TrainerConfig) -> dict[str, PoolConfig]:
    """Returns the pools whose processes are ranks, which with trainer.device=cuda have a GPU each: all but that of simulators."""
    own = pool_name(trainer, ENVIRONMENTS)
    return {name: pool for name, pool in pools_of(trainer).items() if name == MAIN or name != own}


def pool_name(trainer: TrainerConfig, role: str) -> str:
    """Returns the name of a role's pool; MAIN where its pool does not exist."""
    name = trainer.placement.get(role, MAIN)
    return name if isinstance(name, str) and name in trainer.pools else MAIN


def pool_of(trainer: TrainerConfig, role: str) -> PoolConfig:
    """Returns a role's pool."""
    return pools_of(trainer)[pool_name(trainer, role)]


def is_separate(trainer: TrainerConfig, role: str) -> bool:
    """Returns True where a role is on another pool than the main one."""
    return pool_name(trainer, role) != MAIN


def size_text(trainer: TrainerConfig, role: str) -> str:
    """Returns the setting that gives the ranks per machine of a role's pool, with its value."""
    name = pool_name(trainer, role)
    where = "trainer" if name == MAIN else f"{_POOLS}.{name}"
    return f"{where}.n_gpus_per_node={pool_of(trainer, role).n_gpus_per_node}"


def problems(config: PPOConfig) -> list[str]:
    """Returns the problems of the pools and of the roles on them; engines.py checks the layout of their models."""
    trainer = config.trainer
    if not trainer.pools and not trainer.placement:
        return []
    return _faulty(trainer) or [*_rows(config), *_idle(config)]


def no_roles(trainer: TrainerConfig) -> list[str]:
    """Returns the problems of pools in a job with one model, which has nothing to place but roles of a pipeline of one's own."""
    if not trainer.pools and not trainer.placement:
        return []
    if _may_have_roles(trainer):
        return _faulty(trainer)
    return [
        f"{_POOLS} and {_PLACEMENT} are for reinforcement learning (main_ppo, main_eval); here there is one model, on all ranks"
    ]


def unplaceable(trainer: TrainerConfig, usual: Container[str], own: Iterable[str]) -> list[str]:
    """Returns the problems of roles that are placed and that there are not.  usual: the job's; own: its pipeline's."""
    known = [*(role for role in ROLES if ("rollout" if role == ENVIRONMENTS else role) in usual), *own]
    return [
        f"{_PLACEMENT}.{role}: no such role{suggest(role, known)} known: {', '.join(known)}"
        for role in trainer.placement
        if role not in (*known, *_ACTOR)
    ]


def unneeded(config: PPOConfig, requires: AbstractSet[str]) -> list[str]:
    """Returns the problems of a critic and of a reference that are placed while nothing needs them.

    requires: of the registry rows of all estimators.
    """
    missing = {
        "critic": "" if "values" in requires else f"algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic",
        "reference": "" if reads_reference(config, requires) else f"there is no reference without {READERS}",
    }
    return [
        f"{_PLACEMENT}.{role}={config.trainer.placement[role]}, but {why}; remove it and its pool"
        for role, why in missing.items()
        if why and is_separate(config.trainer, role)
    ]


READERS = "actor_rollout_ref.actor.use_kl_loss, algorithm.use_kl_in_reward or adv_estimator=on_policy_distillation"
"""Settings by which the log-probs of the reference are read."""


def reads_reference(config: PPOConfig, requires: AbstractSet[str]) -> bool:
    """Returns whether the log-probs of the reference are read.  requires: of the estimator's registry row."""
    return config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward or "reference" in requires


def on_machine(trainer: TrainerConfig, num_gpus: int) -> list[str]:
    """Returns the problem of pools that together need more GPUs than the machine's `num_gpus`."""
    needs = {name: float(pool.ranks) for name, pool in pools_of_ranks(trainer).items()}
    if is_separate(trainer, ENVIRONMENTS) and (own := pool_of(trainer, ENVIRONMENTS)).process_gpus:
        needs[pool_name(trainer, ENVIRONMENTS)] = own.ranks * own.process_gpus
    needed = sum(needs.values())
    if len(needs) == 1 or needed <= num_gpus:
        return []
    arithmetic = " + ".join(f"{need:g} ({name})" for name, need in needs.items())
    return [f"the pools need {arithmetic} = {needed:g} GPUs, this machine has {num_gpus}; lower {_POOLS}.*.n_gpus_per_node"]


def cpus_on_machine(trainer: TrainerConfig, num_cpus: int) -> list[str]:
    """Returns the problem of simulators that reserve more CPUs than a cluster of this machine has beside those of the ranks.

    num_cpus: those of the machine; trainer.ray_init.num_cpus stands for them where it is set.
    """
    own, key = pool_of(trainer, ENVIRONMENTS), f"{_POOLS}.{pool_name(trainer, ENVIRONMENTS)}"
    if not is_separate(trainer, ENVIRONMENTS) or not own.process_cpus:
        return []
    ranks, each = sum(pool.ranks for pool in pools_of_ranks(trainer).values()), own.process_cpus
    available, needed = max(int(trainer.ray_init.get("num_cpus") or num_cpus), ranks), ranks + own.ranks * each
    if needed <= available:
        return []
    return [
        f"{key}.process_cpus={each:g}: {own.ranks} processes x {each:g} + {ranks} ranks = {needed:g} CPUs, and the cluster that "
        f"is started here has {available}; lower it or {key}.n_gpus_per_node, or raise trainer.ray_init.num_cpus (logical CPUs)"
    ]


def _entry(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _faulty_pools(trainer: TrainerConfig) -> Iterator[str]:
    fields = [field.name for field in dataclasses.fields(PoolConfig)]
    for name, value in trainer.pools.items():
        key = f"{_POOLS}.{name}"
        if name == MAIN:
            yield f"{key}: the main pool's size is trainer.nnodes x trainer.n_gpus_per_node; give another pool another name"
        elif not isinstance(value, Mapping):
            yield f"{key}={value}: expected a mapping of {' and '.join(fields[:2])}; {_EXAMPLE}"
        else:
            yield from (
                f"{key}.{field}: no such setting{suggest(str(field), fields)} known: {', '.join(fields)}"
                for field in value
                if field not in fields
            )
            wrong: list[str] = []
            build(PoolConfig, value, wrong, prefix=f"{key}.")
            yield from wrong
            if name != pool_name(trainer, ENVIRONMENTS):
                reserved = [field for field in ("process_cpus", "process_gpus") if field in value]
                yield from (
                    f"{key}.{field}: only a pool of simulators reads it ({_PLACEMENT}.{ENVIRONMENTS})" for field in reserved
                )
            if name not in trainer.placement.values():
                yield f"{key}: no role is placed there; place one ({_PLACEMENT}.ROLE={name}) or remove the pool"


def _may_have_roles(trainer: TrainerConfig) -> bool:
    """Returns whether a pipeline of one's own is the step: the roles are then known when it has been loaded."""
    return ":" in (trainer.pipeline or "")


def _faulty(trainer: TrainerConfig) -> list[str]:
    found = [*_faulty_pools(trainer), *_faulty_placement(trainer)]
    if trainer.backend == "local":
        found.append(
            f"{_POOLS} with trainer.backend=local, which has one rank in this process and no second pool; use trainer.backend=ray"
        )
    return found


def _faulty_placement(trainer: TrainerConfig) -> Iterator[str]:
    if not _may_have_roles(trainer):
        yield from unplaceable(trainer, ROLES, ())
    pools = [MAIN, *(name for name in trainer.pools if name != MAIN)]
    for role, name in trainer.placement.items():
        if role in _ACTOR:
            yield f"{_PLACEMENT}.{role}: the actor is always on the main pool; place the other roles: {', '.join(ROLES)}"
        if name not in pools:
            yield f"{_PLACEMENT}.{role}={name}: no such pool{suggest(str(name), pools)} known: {', '.join(pools)}; {_EXAMPLE}"


def _rows(config: PPOConfig) -> Iterator[str]:
    """Yields the problems of batches with fewer rows than a critic's own pool has ranks, or fewer prompts than engines."""
    data, rollout = config.data, config.actor_rollout_ref.rollout
    pool = pool_of(config.trainer, "critic")
    shards = pool.ranks // ranks_per_copy(config.critic.section)
    samples = (config.critic.ppo_mini_batch_size or 0) * rollout.n
    if is_separate(config.trainer, "critic") and samples < shards:
        yield f"critic.ppo_mini_batch_size: {samples} samples cannot feed the {shards} data-parallel ranks of the critic's pool"
    pool = pool_of(config.trainer, "rollout")
    engines = pool.ranks // rollout.tensor_model_parallel_size
    if is_separate(config.trainer, "rollout") and data.train_batch_size < engines:
        yield f"data.train_batch_size={data.train_batch_size} prompts cannot feed the {engines} engines of the rollout's pool"


def _idle(config: PPOConfig) -> Iterator[str]:
    """Yields the problems of roles that are placed and that this run does not have."""
    scoring = config.reward_model
    missing = {
        "reward_model": "" if scoring.enable else "reward_model.enable is off",
        "judge": "" if scoring.judge.model.path else "reward_model.judge.model.path is not set",
        ENVIRONMENTS: "" if config.env.name else "there are no simulators without env.name",
    }
    for role, why in missing.items():
        if why and is_separate(config.trainer, role):
            yield f"{_PLACEMENT}.{role}={config.trainer.placement[role]}, but {why}; remove it and its pool, or switch it on"
