"""The bytes of a model on one rank: parameters, gradients and optimizer states, and the activations of its largest pass.

All of it is arithmetic on the sizes in the model's config.json and loads no torch.  A test on CPU compares it with the memory
of a process that trains.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from rlhub.config.rules.engines import Engine
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.training import FSDPConfig, MegatronConfig, Section, recompute_of
from rlhub.models.shape import ModelShape

ITEM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2}
LOGITS = {"cpu": 1 << 23, "cuda": 1 << 27}
"""Logits that the training engines compute at one time (`CHUNK_ELEMENTS` of engines/training/fsdp/logprob.py)."""
WHOLE_GRADIENT_BYTES = 2 << 30
"""FSDP2 reduces gradients up to this size once a step (`UNSHARDED_GRAD_BYTES` of engines/training/fsdp/engine.py)."""
PAIR = 2
"""Sequences in a row of preferences."""


@dataclass(slots=True, kw_only=True)
class Bytes:
    """Bytes of a model on one rank.  states: moments, and master weights where the model computes in half precision."""

    params: float
    grads: float = 0.0
    states: float = 0.0


@dataclass(slots=True, kw_only=True, frozen=True)
class Pass:
    """A forward pass.  num_tokens: its tokens on a rank, with every row as long as it may be.  cures: settings that make it need
    less memory."""

    num_tokens: int
    cures: tuple[str, ...]


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


@functools.singledispatch
def largest_pass(config: Any, engine: Engine, num_parts: int) -> Pass:
    """Returns the largest pass of the model's update.  num_parts: ranks among which the rows are divided."""
    raise TypeError(f"no passes in {type(config).__name__}")


@largest_pass.register
def _(config: PPOConfig, engine: Engine, num_parts: int) -> Pass:
    key = "critic" if engine.role == "critic" else "actor_rollout_ref.actor"
    section = config.critic if engine.role == "critic" else config.actor_rollout_ref.actor
    prompts = section.ppo_mini_batch_size or config.actor_rollout_ref.actor.ppo_mini_batch_size
    rows = prompts * config.actor_rollout_ref.rollout.n
    longest = config.data.max_prompt_length + config.data.max_response_length
    by_tokens = section.ppo_max_token_len_per_gpu if section.use_dynamic_bsz else None
    return _pass(engine, f"{key}.ppo_", rows, num_parts, longest, by_tokens, section.ppo_micro_batch_size_per_gpu)


@largest_pass.register(SFTConfig)
@largest_pass.register(DPOConfig)
@largest_pass.register(RMConfig)
def _(config: SFTConfig | DPOConfig | RMConfig, engine: Engine, num_parts: int) -> Pass:
    data = config.data
    longest = data.max_length * (1 if isinstance(config, SFTConfig) else PAIR)
    by_tokens = data.max_token_len_per_gpu if data.use_dynamic_bsz else None
    return _pass(engine, "data.", data.train_batch_size, num_parts, longest, by_tokens, data.micro_batch_size_per_gpu)


def _pass(
    engine: Engine, prefix: str, rows: int, num_parts: int, longest: int, by_tokens: int | None, by_rows: int | None
) -> Pass:
    """Returns the pass of a rank with its share of `rows` rows.  prefix: of the limits' keys; by_tokens, by_rows: the limits."""
    share = max(-(-rows // num_parts), 1)
    limit = f"{prefix}max_token_len_per_gpu" if by_tokens else f"{prefix}micro_batch_size_per_gpu"
    most = min(by_rows or share, share) * longest if by_tokens is None else min(by_tokens, share * longest)
    model, section = engine.role_model.model, engine.section
    cures = [f"{limit} (less)"]
    if not model.enable_gradient_checkpointing:
        cures.append(f"{engine.role_model.model_key}.enable_gradient_checkpointing=true")
    elif recompute_of(model, section) != "full":
        cures.append(f"{engine.key}.recompute_granularity=full")
    return Pass(num_tokens=most, cures=tuple(cures))


def compute_bytes(section: Section, device: str) -> int:
    """Returns the bytes of an activation: on GPUs the engines compute in bfloat16."""
    if isinstance(section, FSDPConfig):
        return 2 if device == "cuda" and section.model_dtype != "fp64" else ITEM_BYTES[section.model_dtype]
    return ITEM_BYTES[section.model_dtype or ("bf16" if device == "cuda" else "fp32")]


def pass_bytes(engine: Engine, shape: ModelShape, num_tokens: int, *, device: str, head: bool) -> float:
    """Returns the bytes of the activations of a pass that is not the first of its step, so that all gradients are there.

    The head's backward pass comes before those of the layers: the larger of the two counts.  head: the model has a vocabulary.
    """
    section, model = engine.section, engine.role_model.model
    item, cuts, own = compute_bytes(section, device), 1, num_tokens
    recompute = recompute_of(model, section)
    if isinstance(section, MegatronConfig):
        cuts, own = section.tensor_model_parallel_size, num_tokens // section.context_model_parallel_size
        recompute = "full" if recompute == "full" else "none"  # what it recomputes else, attention's scores, no kernel keeps
    kept, in_layer = shape.activation_bytes(own, item, recompute=recompute)
    in_head = _head_bytes(shape, own, item, device, trained=model.lora_rank == 0) if head else 0.0
    return (kept + max(in_layer, in_head)) / cuts


def _head_bytes(shape: ModelShape, num_tokens: int, item: int, device: str, *, trained: bool) -> float:
    """Returns the bytes of two chunks of logits and of the head's gradient, both in float32, and of one chunk's product, which is
    a tensor of its own only in half precision."""
    logits = min(LOGITS[device], num_tokens * shape.vocab_size / 2)
    return 4.0 * 2 * logits + ((4 + item % 4) * shape.vocab_size * shape.hidden_size if trained else 0)


def gathered_bytes(section: Section, shape: ModelShape, num_params: int, num_shards: int, device: str, *, trained: bool) -> float:
    """Returns the bytes of what FSDP2 gathers in an update: vocabularies and two layers, the gradients of the head and of one
    layer, and the whole gradient where it is reduced once a step.  On CPU one rank gathers nothing.  trained: False where only
    adapters train."""
    if not isinstance(section, FSDPConfig) or (device == "cpu" and num_shards == 1):
        return 0.0
    item, head = compute_bytes(section, device), shape.vocab_size * shape.hidden_size
    vocabularies = head if shape.tied else 2 * head
    layer = max(num_params - vocabularies, 0) / shape.num_layers
    gathered = min(num_params, vocabularies + 2 * layer) * item
    if not trained:
        return gathered
    whole = num_params * ITEM_BYTES[section.model_dtype]
    return (
        gathered + min(num_params, head + layer) * item + (whole * (1 - 1 / num_shards) if whole <= WHOLE_GRADIENT_BYTES else 0)
    )
