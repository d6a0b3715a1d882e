"""Compares what a run keeps on a GPU with the GPU's memory, by arithmetic, before any process starts.

It counts a lower bound: parameters, gradients and optimizer states of the models that share a GPU, and the share of memory that a
rollout engine takes, or its weights where it takes what it needs.  Activations and the libraries' own memory come on top, so
that a run which passes may still not fit.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhub.config.rules import asynchronous, placement
from rlhub.config.rules.engines import Engine, engines, role_ranks
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.reward import JudgeConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, ModelConfig, Section
from rlhub.engines.rollout.registry import memory_share
from rlhub.errors import ConfigError
from rlhub.models.shape import count_params
from rlhub.trainer.ppo.requirements import requirements

GIB = float(1 << 30)
ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
ENGINE_BYTES = {"float32": 4}
"""Bytes of a weight in a rollout engine, for the dtypes where they are not 2."""
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(slots=True, kw_only=True)
class Bytes:
    """Bytes of a model on one rank.  states: moments, and master weights where the model computes in half precision."""

    params: float
    grads: float = 0.0
    states: float = 0.0


@dataclass(slots=True, kw_only=True)
class DeviceModel:
    """A model that shares a rank's GPU.

    key: key of its section; whole: its bytes while it trains; on_gpu: the bytes that stay on the GPU while others compute;
    trained: the run updates it.
    """

    key: str
    whole: Bytes
    on_gpu: Bytes
    trained: bool


@dataclass(slots=True, kw_only=True)
class Share:
    """The part of a GPU's memory that a rollout engine takes.

    key: key of the setting that decides it; share: fraction of the memory, 0 where the engine takes what it needs; weights: bytes
    of its weights on a GPU, 0 where the model's size is not known; always: it keeps the memory while models train.
    """

    key: str
    share: float
    weights: float
    always: bool

    def bytes(self, device: float) -> float:
        """Returns the bytes that the engine takes at least on a GPU with `device` bytes."""
        return self.share * device if self.share else self.weights


@functools.singledispatch
def bytes_of(section: Section, num_params: int, num_ranks: int, trained: bool) -> Bytes:
    """Returns a lower bound of a rank's bytes for a model of `num_params` parameters under a training engine's section."""
    raise TypeError(f"no section of a training engine: {type(section).__name__}")


@bytes_of.register
def _(section: FSDPConfig, num_params: int, num_ranks: int, trained: bool) -> Bytes:
    """Returns `bytes_of` for FSDP2: parameters, gradients and two moments are sharded alike and have one dtype."""
    own = num_params / (num_ranks if section.fsdp_size == -1 else section.fsdp_size) * ITEM_BYTES[section.model_dtype]
    return Bytes(params=own, grads=own, states=2 * own) if trained else Bytes(params=own)


@bytes_of.register
def _(section: MegatronConfig, num_params: int, num_ranks: int, trained: bool) -> Bytes:
    """Returns `bytes_of` for Megatron: float32 gradients, two float32 moments, and float32 masters of bfloat16 weights."""
    pieces = section.tensor_model_parallel_size * section.pipeline_model_parallel_size * section.expert_model_parallel_size
    own, item = num_params / pieces, ITEM_BYTES[section.model_dtype or "bf16"]
    stepped = num_params / num_ranks if section.use_distributed_optimizer else own
    if not trained:
        return Bytes(params=own * item)
    return Bytes(params=own * item, grads=own * 4, states=stepped * (12 if item == 2 else 8))


def at_rest(section: Section, held: Bytes) -> Bytes:
    """Returns the bytes that stay on the GPU while others compute: FSDP frees its gradients, Megatron keeps their buffers."""
    grads_stay = isinstance(section, MegatronConfig) and not section.grad_offload
    return Bytes(
        params=0.0 if section.param_offload else held.params,
        grads=held.grads if grads_stay else 0.0,
        states=0.0 if section.optimizer_offload else held.states,
    )


def check_memory(config: PPOConfig | SFTConfig | DPOConfig | RMConfig, device_gb: float) -> list[str]:
    """Returns the problems of what exceeds GPUs of `device_gb` GiB.

    config: a derived configuration without other problems.
    """
    pools: dict[str, list[DeviceModel]] = {}
    for engine, trained in _models(config):
        scores = engine.role in ("critic", "reward_model") or isinstance(config, RMConfig)
        tenant = _tenant(engine, trained, role_ranks(config.trainer, engine.role).count, language_model=not scores)
        if tenant is not None:
            pools.setdefault(placement.pool_name(config.trainer, engine.role), []).append(tenant)
    shares = _shares(config) if isinstance(config, PPOConfig) else {}
    found = [problem for share in itertools.chain(*shares.values()) for problem in _check_share(share, device_gb * GIB)]
    for pool in dict.fromkeys([*pools, *shares]):
        where = "trainer" if pool == placement.MAIN else f"trainer.pools.{pool}"
        found += _check_pool(pools.get(pool, []), shares.get(pool, []), device_gb * GIB, f"{where}.n_gpus_per_node")
    return found


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


def _tenant(engine: Engine, trained: bool, num_ranks: int, *, language_model: bool) -> DeviceModel | None:
    """Returns the engine's model as a tenant of its GPUs, or None where the size of the model is not known."""
    model = engine.role_model.model
    num_params = _num_params(model, language_model=language_model)
    if num_params is None:
        return None
    held = bytes_of(engine.section, num_params, num_ranks, trained and model.lora_rank == 0)
    return DeviceModel(key=engine.key, whole=held, on_gpu=at_rest(engine.section, held), trained=trained)


def _shares(config: PPOConfig) -> dict[str, list[Share]]:
    """Returns the shares that rollout engines take of the GPUs of each pool."""
    found: dict[str, list[Share]] = {}
    rollout, judge, trainer = config.actor_rollout_ref.rollout, config.reward_model.judge, config.trainer
    if not trainer.replay_from and not asynchronous.is_collected(config):
        always = asynchronous.is_async(config) or not rollout.free_cache_engine
        size = ENGINE_BYTES.get(rollout.dtype, 2)
        share = _share_of(rollout.name, rollout, _ROLLOUT, config.actor_rollout_ref.model, size, always=always)
        found.setdefault(placement.pool_name(trainer, "rollout"), []).extend(share)
    if judge.model.path:
        share = _share_of(judge.name or rollout.name, judge, "reward_model.judge", judge.model.as_model(), 2, always=True)
        found.setdefault(placement.pool_name(trainer, "judge"), []).extend(share)
    return found


def _share_of(
    name: str, section: RolloutConfig | JudgeConfig, key: str, model: ModelConfig, item_bytes: int, *, always: bool
) -> list[Share]:
    """Returns the share of the engine of that name; [] for one that has no model on these GPUs.  key: key of the section."""
    taken = memory_share(name, section)
    if taken is None:
        return []
    weights = (_num_params(model) or 0) * item_bytes / section.tensor_model_parallel_size
    if taken:
        return [Share(key=f"{key}.gpu_memory_utilization", share=taken, weights=weights, always=always)]
    return [Share(key=f"{key}.name", share=0.0, weights=weights, always=True)]


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
    named = {"parameters": held.params, "gradients": held.grads, "optimizer states": held.states}
    parts = " + ".join(f"{size / GIB:.1f} {name}" for name, size in named.items() if size)
    return f"{_total(held) / GIB:.1f} GiB of {key} ({parts})"


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
