"""Rules of asynchronous rollouts, between rollout.mode, the bound on staleness and the policy for stale samples."""

from __future__ import annotations

from collections.abc import Iterator

from rlhub.config.rules.placement import is_separate, pool_of, size_text
from rlhub.config.sections import rollout_correction
from rlhub.config.sections.ppo import ActorRolloutRefConfig, PPOConfig
from rlhub.config.sections.trainer import TrainerConfig

SYNC = "sync"
_ROLLOUT = "actor_rollout_ref.rollout"
_SERVICE_KEYS = (
    *("recompute_kv_cache", "weights", "weights_folder", "weights_full_every", "trajectories_folder", "replica_restarts"),
    *("multi_turn.", "agent."),
)
_TRAINER_KEYS = ("pipeline_depth", "pacing", "stale_policy")
_ENVIRONMENT = "environment"
_COLLECTED = f"{_ROLLOUT}.trajectories_folder"
_UNREAD_COLLECTED = (
    *("agent.num_workers", "agent.num_env_hosts", "agent.episode_retries", "agent.min_samples", "replica_restarts"),
    *("min_replicas", "max_replicas"),
)


def is_async(config: PPOConfig) -> bool:
    """Returns True where episodes run on a rollout service, in parallel with training."""
    return config.actor_rollout_ref.rollout.mode != SYNC and config.env.name is None


def runs_ahead(config: PPOConfig) -> bool:
    """Returns True where the rollout's ranks run episodes of simulators while the policy trains on those before."""
    return config.actor_rollout_ref.rollout.mode != SYNC and config.env.name is not None


def is_collected(config: PPOConfig) -> bool:
    """Returns True where another job runs the episodes, and this one trains on the files that it writes."""
    return is_async(config) and config.actor_rollout_ref.rollout.trajectories_folder is not None


def may_be_stale(config: PPOConfig) -> bool:
    """Returns True where a training batch may hold tokens of an older policy than the one that is updated."""
    return (is_async(config) or runs_ahead(config)) and config.trainer.max_staleness > 0


def takes_turns(config: PPOConfig) -> bool:
    """Returns True where replicas run on the actor's devices and nothing generates while it trains, so that each can have the
    device's memory in turn."""
    beside = is_async(config) and not is_collected(config) and not is_separate(config.trainer, "rollout")
    return beside and not may_be_stale(config)


def replica_places(config: ActorRolloutRefConfig, trainer: TrainerConfig) -> list[int]:
    """Returns the number of replicas that each machine of the rollout's pool holds."""
    pool = pool_of(trainer, "rollout")
    return [pool.n_gpus_per_node // config.rollout.tensor_model_parallel_size] * pool.nnodes


def problems(config: PPOConfig) -> list[str]:
    """Returns the problems of asynchronous settings."""
    schedule = _asynchronous if is_async(config) else _ahead if runs_ahead(config) else _synchronous
    found = [*schedule(config), *_replayed(config)]
    return [*found, *_collected(config)] if is_collected(config) else found


def notes(config: PPOConfig) -> list[str]:
    """Returns notes on settings that are allowed and may surprise."""
    return list(_surprises(config)) if may_be_stale(config) else []


def unread(config: PPOConfig) -> tuple[str, ...]:
    """Returns the keys of asynchronous settings that this run does not read, for the reason that `why_unread` returns.

    A key that ends in `.` means all keys below it.
    """
    if is_collected(config):
        return (*(f"{_ROLLOUT}.{key}" for key in _UNREAD_COLLECTED), "trainer.pacing")
    if is_async(config):
        return ()
    if runs_ahead(config):
        return (*(f"{_ROLLOUT}.{key}" for key in _SERVICE_KEYS), "trainer.stale_policy", "trainer.pacing")
    return (*(f"{_ROLLOUT}.{key}" for key in _SERVICE_KEYS), *(f"trainer.{key}" for key in _TRAINER_KEYS))


def why_unread(config: PPOConfig) -> str:
    """Returns the reason for `unread`."""
    if is_collected(config):
        return f"{_COLLECTED} is set, and the job that collects runs its episodes in its own process"
    if runs_ahead(config):
        return "env.name is set, whose episodes run in the rollout's ranks and are never older than trainer.max_staleness"
    return f"{_ROLLOUT}.mode=sync does not read it"


def _synchronous(config: PPOConfig) -> Iterator[str]:
    rollout, staleness = config.actor_rollout_ref.rollout, config.trainer.max_staleness
    yield from _no_service(config)
    if staleness > 0:
        yield (
            f"trainer.max_staleness={staleness} with {_ROLLOUT}.mode={rollout.mode}: generation and training take turns, so "
            f"no sample is ever old; set {_ROLLOUT}.mode=async, or trainer.max_staleness=0"
        )
    if rollout.multi_turn.enable:
        yield (
            f"{_ROLLOUT}.multi_turn.enable=true with {_ROLLOUT}.mode={rollout.mode}: whole batches have single turns; "
            f"set {_ROLLOUT}.mode=async"
        )
    if rollout.agent.default_agent_loop:
        yield (
            f"{_ROLLOUT}.agent.default_agent_loop={rollout.agent.default_agent_loop} with {_ROLLOUT}.mode={rollout.mode}: "
            f"workflows run on the rollout service; set {_ROLLOUT}.mode=async"
        )


def _ahead(config: PPOConfig) -> Iterator[str]:
    """Yields the problem of ranks that cannot simulate and train at the same time."""
    staleness = config.trainer.max_staleness
    yield from _no_service(config)
    if staleness > 0 and not is_separate(config.trainer, "rollout"):
        yield (
            f"trainer.max_staleness={staleness} with env.name={config.env.name}: the actor's ranks cannot run episodes while "
            "they train; give the rollout a pool of its own (trainer.placement.rollout), or set trainer.max_staleness=0"
        )


def _asynchronous(config: PPOConfig) -> Iterator[str]:
    trainer, correction = config.trainer, config.algorithm.rollout_correction
    corrects = correction.active or correction.in_update
    if trainer.stale_policy == "correct" and not corrects:
        yield (
            f"trainer.stale_policy=correct, but nothing corrects: set {rollout_correction.KEY}.rollout_is=token (weights), "
            ".rollout_rs (rejection), .proximal=a3po or .bypass_mode=true; or use trainer.stale_policy=drop or mask"
        )
    yield from _environments(config)
    yield from _weights(config)
    yield from _replicas(config)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.agent.min_samples is not None, "derive first"
    if rollout.agent.min_samples > rollout.n:
        yield (
            f"{_ROLLOUT}.agent.min_samples={rollout.agent.min_samples} is more than {_ROLLOUT}.n={rollout.n}: no group has so "
            f"many samples; set it to {rollout.n} to train whole groups only, or to null"
        )


def _weights(config: PPOConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.weights in ("memory", "collective") and rollout.weights_folder is not None:
        yield (
            f"{_ROLLOUT}.weights={rollout.weights} with {_ROLLOUT}.weights_folder={rollout.weights_folder}: these weights go "
            "through no folder; set weights=folder, or weights_folder=null"
        )


def _given_replicas(config: PPOConfig) -> dict[str, int]:
    rollout = config.actor_rollout_ref.rollout
    given = {f"{_ROLLOUT}.min_replicas": rollout.min_replicas, f"{_ROLLOUT}.max_replicas": rollout.max_replicas}
    return {key: number for key, number in given.items() if number is not None}


def _no_service(config: PPOConfig) -> Iterator[str]:
    """Yields the problem of replicas that should come and go where ranks generate, whose number is fixed."""
    for key, number in _given_replicas(config).items():
        why = f"env.name={config.env.name}" if config.env.name is not None else f"{_ROLLOUT}.mode=sync"
        remedy = "" if config.env.name is not None else f", or set {_ROLLOUT}.mode=async"
        yield f"{key}={number} with {why}: the ranks of the pool generate, and their number is fixed; set it to null{remedy}"


def _replicas(config: PPOConfig) -> Iterator[str]:
    """Yields the problems of bounds that exclude each other, and of a pool that cannot hold as many replicas."""
    rollout, trainer, given = config.actor_rollout_ref.rollout, config.trainer, _given_replicas(config)
    if len(given) == 2 and (rollout.min_replicas or 0) > (rollout.max_replicas or 0):
        lower, upper = (f"{key}={number}" for key, number in given.items())
        yield f"{lower} is more than {upper}: lower the one or raise the other"
    pool, each = pool_of(trainer, "rollout"), rollout.tensor_model_parallel_size
    places = sum(replica_places(config.actor_rollout_ref, trainer))
    for key, number in given.items():
        if number > places:
            ranks = f"{pool.nnodes} machines x {size_text(trainer, 'rollout')}"
            shared = f" / {_ROLLOUT}.tensor_model_parallel_size={each}" if each > 1 else ""
            yield (
                f"{key}={number}: the rollout's pool holds {places} replicas ({ranks}{shared}), and {number} need "
                f"{number * each} ranks; lower it, or give the pool more ranks"
            )


def _environments(config: PPOConfig) -> Iterator[str]:
    agent = config.actor_rollout_ref.rollout.agent
    own_workflow = ":" in (agent.default_agent_loop or "")
    if agent.num_env_hosts > 0 and not agent.kwargs.get(_ENVIRONMENT) and not own_workflow:
        yield (
            f"{_ROLLOUT}.agent.num_env_hosts={agent.num_env_hosts}, but no episode asks for an environment: name one in "
            f"{_ROLLOUT}.agent.kwargs.{_ENVIRONMENT} with the workflow that plays in it, or set num_env_hosts=0"
        )
    if agent.env_host_gpus > 1 and agent.env_host_gpus % 1:
        yield (
            f"{_ROLLOUT}.agent.env_host_gpus={agent.env_host_gpus:g}: Ray gives parts of one GPU or whole ones; set "
            f"{int(agent.env_host_gpus)} or {int(agent.env_host_gpus) + 1}"
        )


def _replayed(config: PPOConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.replay_from and trainer.record_batches:
        yield f"trainer.record_batches=true with trainer.replay_from={trainer.replay_from}: these batches are recorded already"
    if trainer.replay_from and trainer.test_freq > 0:
        yield (
            f"trainer.test_freq={trainer.test_freq} with trainer.replay_from={trainer.replay_from}: nothing generates there; "
            "set trainer.test_freq=-1 and validate its checkpoints with python -m rlhub.trainer.main_eval"
        )


def _collected(config: PPOConfig) -> Iterator[str]:
    """Yields the settings that a collecting job cannot follow, since it gets nothing of this job but its weights."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    given = f"{_COLLECTED}={rollout.trajectories_folder}"
    if rollout.weights_folder is None:
        yield (
            f"{given} without {_ROLLOUT}.weights_folder: the collecting job takes its weights from there; name a folder that "
            "both reach"
        )
    if trainer.stale_policy != "correct":
        yield (
            f"trainer.stale_policy={trainer.stale_policy} with {given}: the collecting job cannot know what training "
            "left out and would wait for it for ever; set trainer.stale_policy=correct"
        )
    if trainer.test_freq > 0:
        yield (
            f"trainer.test_freq={trainer.test_freq} with {given}: nothing generates here; set trainer.test_freq=-1 and validate "
            "the checkpoints with python -m rlhub.trainer.main_eval"
        )
    if config.algorithm.filtering:
        yield (
            f"{config.algorithm.filtering} with {given}: the collecting job neither scores nor filters; leave it out, "
            f"or set {_COLLECTED} to null"
        )


def _surprises(config: PPOConfig) -> Iterator[str]:
    trainer, correction = config.trainer, config.algorithm.rollout_correction
    depth = trainer.pipeline_depth
    assert depth is not None, "derive first"
    if depth > trainer.max_staleness:
        yield (
            f"trainer.pipeline_depth={depth} is more than trainer.max_staleness={trainer.max_staleness}: generation runs at most "
            f"{trainer.max_staleness} batches ahead, or its samples would be too old"
        )
    if depth == 0:
        yield (
            f"trainer.pipeline_depth=0: generation waits for each update, so trainer.max_staleness={trainer.max_staleness} "
            "is never reached; raise it to let generation run ahead"
        )
    if not (correction.active or correction.in_update):
        yield (
            f"trainer.max_staleness={trainer.max_staleness} without {rollout_correction.KEY}: samples up to that old are trained "
            f"as if they were new; {rollout_correction.KEY}.rollout_is=token weights them by pi_old / mu"
        )
