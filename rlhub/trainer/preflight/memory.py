"""Compares what a run keeps on a GPU with the GPU's memory, by arithmetic, before any process starts.

What surely exceeds the GPU is refused: parameters, gradients and optimizer states of the models that share it, and the share of
memory that a rollout engine takes, or its weights where it takes what it needs.  The activations of the largest pass come on
top; rows are often shorter than the longest, so that a pass that would not fit is a warning.  The libraries' own memory, about
1 GiB, is left out.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlhub.config.rules import asynchronous, placement
from rlhub.config.rules.engines import Engine, engines, role_ranks
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.reward import JudgeConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig, Recompute
from rlhub.engines.rollout.registry import BLOCK, memory_share, replicas_sleep
from rlhub.errors import ConfigError
from rlhub.models.shape import count_params, read_model_shape
from rlhub.trainer.ppo.requirements import requirements
from rlhub.trainer.preflight.model_bytes import Bytes, Pass, at_rest, bytes_of, gathered_bytes, largest_pass, pass_bytes

Config = PPOConfig | SFTConfig | DPOConfig | RMConfig
GIB = float(1 << 30)
FILLED = 0.9
"""The share of a GPU that an estimate may fill where it chooses: kernels' workspaces, fragments and libraries take the rest."""
logger = logging.getLogger(__name__)
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(slots=True, kw_only=True)
class DeviceModel:
    """A model that shares a rank's GPU.

    role: its name for the user; key: key of its section; whole: its bytes while it trains; on_gpu: the bytes that stay on the GPU
    while others compute; trained: the run updates it; update: the largest pass of its update, and the bytes that the pass adds.
    """

    role: str
    key: str
    whole: Bytes
    on_gpu: Bytes
    trained: bool
    update: tuple[Pass, float] | None = None


@dataclass(slots=True, kw_only=True)
class Share:
    """The part of a GPU's memory that a rollout engine takes.

    name: the engine's; key: key of the setting that decides it; share: fraction of the memory, 0 where the engine takes what it
    needs; weights: bytes of its weights on a GPU, 0 where the model's size is not known; always: it keeps the memory while models
    train.
    """

    name: str
    key: str
    share: float
    weights: float
    always: bool

    def bytes(self, device: float) -> float:
        """Returns the bytes that the engine takes at least on a GPU with `device` bytes."""
        return self.share * device if self.share else self.weights


@dataclass(slots=True, kw_only=True)
class Tenants:
    """The models and engines that share each GPU of a pool.  gpus_key: setting of the pool's GPUs."""

    gpus_key: str
    models: list[DeviceModel]
    shares: list[Share]


def check_memory(config: Config, device_gb: float) -> list[str]:
    """Returns the problems of what surely exceeds GPUs of `device_gb` GiB.

    config: a derived configuration without other problems.
    """
    pools = list(tenants_of(config).values())
    found = [problem for pool in pools for share in pool.shares for problem in _check_share(share, device_gb * GIB)]
    for pool in pools:
        found += _check_pool(pool.models, pool.shares, device_gb * GIB, pool.gpus_key)
    return found


def estimate_memory(config: Config, device_gb: float | None) -> list[str]:
    """Returns a line for each moment of each pool: what a GPU, or on CPU a process, holds then.

    device_gb: GiB of a GPU; None: not known, or the run is on CPU.
    """
    whole = f" of {device_gb:.1f}" if device_gb else " of a GPU" if config.trainer.device == "cuda" else " in a process"
    lines = []
    for name, pool in tenants_of(config).items():
        where = "" if name == placement.MAIN else f" on pool {name}"
        moments = [("generation", None)] if pool.shares else []
        for moment, model in [*moments, *((f"update of {model.role}", model) for model in pool.models if model.trained)]:
            terms, total = _terms(pool, model, device_gb)
            result = f" = {total / GIB:.1f} GiB" if len(terms) > 1 else ""
            lines.append(f"memory estimate: {moment}{where}: {' + '.join(terms)}{result}{whole}")
    return lines


def warn_of_memory(config: Config, device_gb: float) -> list[str]:
    """Returns a sentence for each update whose largest pass would exceed the GPU, though all that surely is there fits."""
    found = []
    for pool in tenants_of(config).values():
        for model in pool.models:
            terms, total = _terms(pool, model, device_gb)
            if model.update and total > device_gb * GIB:
                cures = [
                    *model.update[0].cures,
                    *(cure for other in pool.models if other is not model for cure in _offloads(other)),
                ]
                found.append(
                    f"GPU memory: an update of {model.role} with rows of full length needs {' + '.join(terms)} = "
                    f"{total / GIB:.1f} GiB, more than {device_gb:.1f}; if it runs out of memory, change {_either(cures)}"
                )
    return found


def choose_recompute(config: Config, device_gb: float) -> None:
    """Sets recompute_granularity=auto of each model that trains to the least recomputation with which its largest pass fits a GPU
    of `device_gb` GiB.  A model of unknown size stays as it is, which is full."""
    for engine, trained in _models(config):
        section = engine.section
        if not trained or not isinstance(section, FSDPConfig) or section.recompute_granularity != "auto":
            continue
        ways: tuple[Recompute, ...] = ("none", "selective", "full")
        if not engine.role_model.model.enable_gradient_checkpointing or _num_params(engine.role_model.model) is None:
            continue
        for way in ways:
            section.recompute_granularity = way
            if way == "full" or _update_bytes(config, engine.key, device_gb) <= FILLED * device_gb * GIB:
                logger.info("%s.recompute_granularity=auto is %s, by the memory estimate", engine.key, way)
                break


def _update_bytes(config: Config, key: str, device_gb: float) -> float:
    """Returns the bytes that are on a GPU while the model with that section is updated."""
    for pool in tenants_of(config).values():
        for model in pool.models:
            if model.key == key:
                return _terms(pool, model, device_gb)[1]
    return 0.0


def tenants_of(config: Config) -> dict[str, Tenants]:
    """Returns the models and engines of each pool, with the bytes that each has on one GPU."""
    models: dict[str, list[DeviceModel]] = {}
    for engine, trained in _models(config):
        tenant = _tenant(config, engine, trained)
        if tenant is not None:
            models.setdefault(placement.pool_name(config.trainer, engine.role), []).append(tenant)
    shares = _shares(config) if isinstance(config, PPOConfig) else {}
    return {
        pool: Tenants(
            gpus_key=f"{'trainer' if pool == placement.MAIN else f'trainer.pools.{pool}'}.n_gpus_per_node",
            models=models.get(pool, []),
            shares=shares.get(pool, []),
        )
        for pool in dict.fromkeys([*models, *shares])
    }


def _moment(model: DeviceModel) -> tuple[Bytes, float]:
    """Returns what a model has on the GPU at the largest moment of its update, and the bytes of a pass that is there then.
    States that are offloaded come for the step, when no pass is there."""
    added = model.update[1] if model.update else 0.0
    if model.on_gpu.states or not model.whole.states:
        return model.whole, added
    return (replace(model.whole, states=0.0), added) if added > model.whole.states else (model.whole, 0.0)


def _terms(pool: Tenants, updated: DeviceModel | None, device_gb: float | None) -> tuple[list[str], float]:
    """Returns what is on a GPU while a model is updated (None: while engines generate), each with its GiB, and the sum in
    bytes."""
    terms, total = [], 0.0
    for model in pool.models:
        held, added = _moment(model) if model is updated else (model.on_gpu, 0.0)
        parts = _parts(held)
        if added and model.update:
            parts.append(f"{added / GIB:.1f} a pass of {model.update[0].num_tokens:,} tokens")
        size = _total(held) + added
        total += size
        terms += [f"{model.role} {size / GIB:.1f} GiB ({' + '.join(parts)})"] if size else []
    for share in pool.shares if updated is None else [share for share in pool.shares if share.always]:
        size = share.bytes((device_gb or 0.0) * GIB)
        total += size
        terms.append(f"{share.name} {size / GIB:.1f} GiB" if size or not share.share else f"{share.name} {share.share} of all")
    return terms, total


def _models(config: PPOConfig | SFTConfig | DPOConfig | RMConfig) -> list[tuple[Engine, bool]]:
    """Returns the engines of the models that the run holds, each with True where it trains the model."""
    found = engines(config)
    if not isinstance(config, PPOConfig):
        own_reference = config.model.lora_rank == 0  # else it is the policy with its adapters off
        return [(engine, number == 0) for number, engine in enumerate(found if own_reference else found[:1])]
    needs = requirements(config)
    adapters = config.actor_rollout_ref.model.lora_rank > 0 and config.actor_rollout_ref.ref.model.path is None
    own_reference = not adapters or placement.is_separate(config.trainer, "reference")
    absent = {"critic": not needs.values, "reference": not (needs.reference and own_reference)}
    return [(engine, engine.role in ("actor", "critic")) for engine in found if not absent.get(engine.role, False)]


def _num_params(model: ModelConfig, *, language_model: bool = True) -> int | None:
    """Returns the number of parameters, or None for a model that is not downloaded yet."""
    try:
        return count_params(Path(model.path or "").expanduser(), model.override_config, language_model=language_model)
    except ConfigError:
        return None


def _tenant(config: Config, engine: Engine, trained: bool) -> DeviceModel | None:
    """Returns the engine's model as a tenant of its GPUs, or None where the size of the model is not known."""
    model, num_ranks = engine.role_model.model, role_ranks(config.trainer, engine.role).count
    head = engine.role not in ("critic", "reward_model") and not isinstance(config, RMConfig)
    num_params = _num_params(model, language_model=head)
    if num_params is None:
        return None
    held = bytes_of(engine.section, num_params, num_ranks, trained and model.lora_rank == 0)
    return DeviceModel(
        role=engine.role,
        key=engine.key,
        whole=held,
        on_gpu=at_rest(engine.section, held),
        trained=trained,
        update=_update(config, engine, num_params, num_ranks, head=head) if trained and not model.vla else None,
    )


def _update(config: Config, engine: Engine, num_params: int, num_ranks: int, *, head: bool) -> tuple[Pass, float]:
    """Returns the largest pass of a model's update, and its bytes.  head: the model has a vocabulary."""
    model, section, device = engine.role_model.model, engine.section, config.trainer.device
    shape = read_model_shape(Path(model.path or "").expanduser(), model.override_config)
    one_copy, num_shards = 1, num_ranks
    if isinstance(section, MegatronConfig):
        one_copy = section.tensor_model_parallel_size * section.pipeline_model_parallel_size * section.context_model_parallel_size
    elif section.fsdp_size != -1:
        num_shards = section.fsdp_size
    update = largest_pass(config, engine, max(num_ranks // one_copy, 1))
    size = pass_bytes(engine, shape, update.num_tokens, device=device, head=head)
    size += gathered_bytes(section, shape, num_params, num_shards, device, trained=model.lora_rank == 0)
    return update, size


def _shares(config: PPOConfig) -> dict[str, list[Share]]:
    """Returns the shares that rollout engines take of the GPUs of each pool."""
    found: dict[str, list[Share]] = {}
    rollout, judge, trainer = config.actor_rollout_ref.rollout, config.reward_model.judge, config.trainer
    if not trainer.replay_from and not asynchronous.is_collected(config):
        turns = asynchronous.takes_turns(config) and replicas_sleep(rollout)
        always = not turns if asynchronous.is_async(config) else not rollout.free_cache_engine
        size = 4 if rollout.dtype == "float32" or (rollout.dtype, trainer.device) == ("auto", "cpu") else 2
        share = _share_of(rollout.name, rollout, _ROLLOUT, config.actor_rollout_ref.model, size, always=always)
        if rollout.quantization:
            share = [replace(each, weights=_quantized_bytes(config, size)) for each in share]
        found.setdefault(placement.pool_name(trainer, "rollout"), []).extend(share)
    if judge.model.path:
        share = _share_of(judge.name or rollout.name, judge, "reward_model.judge", judge.model.as_model(), 2, always=True)
        found.setdefault(placement.pool_name(trainer, "judge"), []).extend(share)
    return found if trainer.device == "cuda" else {pool: [_on_cpu(share, rollout) for share in found[pool]] for pool in found}


def _quantized_bytes(config: PPOConfig, item_bytes: int) -> float:
    """Returns the bytes of the weights on a GPU of an engine that stores projections in one byte an element and 4 for each
    block's scale; 0 where the model's size is not known.  item_bytes: of the others."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    num_params = _num_params(model)
    if num_params is None:
        return 0.0
    shape = read_model_shape(Path(model.path or "").expanduser(), model.override_config)
    projections = shape.num_matmul_params - shape.vocab_size * shape.hidden_size
    size = projections * (1 + 4 / BLOCK**2) + (num_params - projections) * item_bytes
    return size / rollout.tensor_model_parallel_size


def _on_cpu(share: Share, rollout: RolloutConfig) -> Share:
    """Returns what the engine has in host memory, where it reads no share: its weights, and the cache where its size is set."""
    cache = (rollout.kv_cache_gb or 0.0) * GIB if share.share and share.key.startswith(_ROLLOUT) else 0.0
    return replace(share, share=0.0, weights=share.weights + cache, always=True)


def _share_of(
    name: str, section: RolloutConfig | JudgeConfig, key: str, model: ModelConfig, item_bytes: int, *, always: bool
) -> list[Share]:
    """Returns the share of the engine of that name; [] for one that has no model on these GPUs.  key: key of the section."""
    taken = memory_share(name, section)
    if taken is None:
        return []
    weights = (_num_params(model) or 0) * item_bytes / section.tensor_model_parallel_size
    if taken:
        return [Share(name=name, key=f"{key}.gpu_memory_utilization", share=taken, weights=weights, always=always)]
    return [Share(name=name, key=f"{key}.name", share=0.0, weights=weights, always=True)]


def _check_share(share: Share, device: float) -> list[str]:
    """Returns the problem of a share that is too small for the engine's weights; its KV cache comes on top."""
    if not share.share or share.weights < share.share * device:
        return []
    text = f"{share.weights / GIB:.1f} GiB of weights, and {share.key}={share.share} of {device / GIB:.1f} GiB is"
    return [
        f"GPU memory: the rollout engine has {text} {share.bytes(device) / GIB:.1f} GiB; change {share.key} (a larger share) or "
        f"{share.key.rpartition('.')[0]}.tensor_model_parallel_size (more GPUs a copy)"
    ]


def _check_pool(tenants: Sequence[DeviceModel], shares: Sequence[Share], device: float, gpus_key: str) -> list[str]:
    """Returns the problems of one pool at two moments: while an engine generates, and in each optimizer step."""
    found, rest = [], sum(_total(tenant.on_gpu) for tenant in tenants)
    more = f"{gpus_key} (more GPUs)"
    if shares and _exceeds(tenants, None, shares, device):
        left = math.floor(100 * (1 - rest / device)) / 100
        cures = [cure for tenant in tenants for cure in _offloads(tenant)]
        cures += [f"{share.key} (there is room for {left:.2f} in all)" for share in shares if share.share and left > 0]
        cures += [
            f"{share.key} (vllm cuts the weights over tensor_model_parallel_size GPUs)" for share in shares if not share.share
        ]
        cures += [more, "trainer.placement.rollout (a pool of its own)"] if tenants else []
        text = _sentence("while the rollout engine generates", tenants, None, shares, device)
        found.append(f"{text}; change {_either(cures)}")
    always = [share for share in shares if share.always]
    for trained in (tenant for tenant in tenants if tenant.trained):
        if _exceeds(tenants, trained, always, device):
            cures = [cure for other in tenants if other is not trained for cure in _offloads(other)]
            cures += [share.key for share in always if share.share]
            smaller = "adapters (model.lora_rank) or strategy=megatron with bfloat16 weights for smaller states"
            text = _sentence(f"in the optimizer step of {trained.key}", tenants, trained, always, device)
            found.append(f"{text}; change {_either([*cures, more, smaller])}")
    return found


def _present(tenants: Sequence[DeviceModel], stepping: DeviceModel | None) -> list[tuple[str, Bytes]]:
    """Returns key and bytes of the models on the GPU while `stepping` takes its optimizer step; None: while none does."""
    held = [(tenant.key, tenant.whole if tenant is stepping else tenant.on_gpu) for tenant in tenants]
    return [(key, size) for key, size in held if _total(size)]


def _exceeds(tenants: Sequence[DeviceModel], stepping: DeviceModel | None, shares: Sequence[Share], device: float) -> bool:
    models = sum(_total(held) for _, held in _present(tenants, stepping))
    return models + sum(share.bytes(device) for share in shares) > device


def _total(held: Bytes) -> float:
    return held.params + held.grads + held.states


def _sentence(
    when: str, tenants: Sequence[DeviceModel], stepping: DeviceModel | None, shares: Sequence[Share], device: float
) -> str:
    terms = [_term(key, held) for key, held in _present(tenants, stepping)] + [_share(share, device) for share in shares]
    return f"GPU memory: {when} a GPU would have to hold {' + '.join(terms)}, more than its {device / GIB:.1f} GiB"


def _term(key: str, held: Bytes) -> str:
    return f"{_total(held) / GIB:.1f} GiB of {key} ({' + '.join(_parts(held))})"


def _parts(held: Bytes) -> list[str]:
    named = {"parameters": held.params, "gradients": held.grads, "optimizer states": held.states}
    return [f"{size / GIB:.1f} {name}" for name, size in named.items() if size]


def _share(share: Share, device: float) -> str:
    if not share.share:
        return f"{share.weights / GIB:.1f} GiB of the rollout engine's weights ({share.key}: it has a whole copy a GPU)"
    return f"{share.bytes(device) / GIB:.1f} GiB by {share.key}={share.share}"


def _offloads(tenant: DeviceModel) -> list[str]:
    """Returns the settings that offload a part of the model, with the GiB that each saves."""
    rest = tenant.on_gpu
    saved = {"optimizer_offload": rest.states, "param_offload": rest.params, "grad_offload": rest.grads}
    return [f"{tenant.key}.{name}=true ({size / GIB:.1f} GiB)" for name, size in saved.items() if size]


def _either(cures: Sequence[str]) -> str:
    return ", ".join(cures[:-1]) + (" or " if cures[:-1] else "") + cures[-1]
