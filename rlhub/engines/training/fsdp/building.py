"""From a configuration to a sharded model with weights, and the root modules that are sharded.

A small model is read by every rank.  A large one is read by rank 0 alone: all ranks shard an empty model and then receive
it weight by weight, so no rank but 0 ever has more than its shard and one tensor in memory.

FSDP gathers a module's weights when its forward is called, so the head's matrix must be used inside the root's forward: a root
module is a Hugging Face model whose forward ends in numbers per target, not logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhub.config.sections.training import ModelConfig
from rlhub.engines.training.fsdp.logprob import token_outputs
from rlhub.engines.training.fsdp.sharding import Layout, ShardedParam, num_bytes, shard_model, sharded_params
from rlhub.engines.training.packing import ModelInputs
from rlhub.models.hf import SCALAR_HEAD, ModelKind, backbone, build_model
from rlhub.models.lora import add_lora, named_parameters
from rlhub.models.packed_attention import PACKED_ATTENTION

BROADCAST_BYTES = 1 << 30
"""Models above this size are read by rank 0 alone."""


@dataclass(slots=True, kw_only=True, frozen=True)
class BuildPlan:
    """kind, dtype of the master weights, temperature of a policy, trainable (False: all weights frozen), seed of new weights."""

    model: ModelConfig
    kind: ModelKind
    dtype: torch.dtype
    temperature: float
    trainable: bool
    seed: int


@dataclass(slots=True, kw_only=True)
class BuiltModel:
    """root: the module that is called and sharded as a whole; model: the Hugging Face model in it; params: its weights."""

    root: nn.Module
    model: PreTrainedModel
    params: list[ShardedParam]


def build_sharded(plan: BuildPlan, layout: Layout, device: torch.device) -> BuiltModel:
    """Builds the sharded model; every rank calls.  Raises ConfigError for an unusable model or target_modules."""
    broadcast = False
    if layout.mesh is not None and dist.get_world_size() > 1:
        empty = _prepared(plan, empty=True)
        broadcast = num_bytes(empty.parameters()) > BROADCAST_BYTES
    model = empty if broadcast else _prepared(plan).to(device)
    root = _root(model, plan)
    compute_dtype = torch.bfloat16 if device.type == "cuda" and plan.dtype == torch.float32 else None
    shard_model(root, model, layout, compute_dtype)
    if broadcast:
        root.to_empty(device=device)
        _receive(model, _prepared(plan) if dist.get_rank() == 0 else None, layout, device)
    return BuiltModel(root=root, model=model, params=sharded_params(model, layout))


def _root(model: PreTrainedModel, plan: BuildPlan) -> nn.Module:
    if plan.kind == "policy":
        return PolicyModule(model, temperature=plan.temperature)
    return ScalarModule(model, output="values" if plan.kind == "value" else "scores")


def _prepared(plan: BuildPlan, *, empty: bool = False) -> PreTrainedModel:
    attention = PACKED_ATTENTION if plan.model.use_remove_padding else "sdpa"
    model = build_model(plan.model, plan.kind, dtype=plan.dtype, attention=attention, seed=plan.seed, empty=empty)
    if plan.model.lora_rank > 0:
        scalar = plan.kind != "policy"
        head: nn.Module = model.get_submodule(SCALAR_HEAD) if scalar else model.get_output_embeddings()
        add_lora(model, plan.model, head=head, seed=plan.seed)
        head.requires_grad_(scalar)  # a scalar head is new or tiny: it is trained as it is
    if not plan.trainable:
        model.requires_grad_(False)
    return model


@torch.no_grad()
def _receive(model: PreTrainedModel, source: PreTrainedModel | None, layout: Layout, device: torch.device) -> None:
    """Fills `model` from rank 0's `source`, buffers too (rotary frequencies are in no checkpoint)."""
    params: dict[str, Tensor] = dict(named_parameters(source)) if source is not None else {}
    for param in sharded_params(model, layout):
        full = _broadcast(params.get(param.name), param.global_shape, param.param.dtype, device)
        param.local.copy_(full[param.offset : param.offset + param.local.shape[0]])
    buffers: dict[str, Tensor] = dict(source.named_buffers()) if source is not None else {}
    for name, buffer in model.named_buffers():
        buffer.copy_(_broadcast(buffers.get(name), tuple(buffer.shape), buffer.dtype, device))


def _broadcast(source: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    full = torch.empty(shape, dtype=dtype, device=device) if source is None else source.to(device)
    dist.broadcast(full, src=0)
    return full


class PolicyModule(nn.Module):
    """Computes log-probs of the targets, entropy and sum of squared probabilities before them, (S,) each, float32 or float64."""

    def __init__(self, model: PreTrainedModel, *, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(self, inputs: ModelInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        head = self.model.get_output_embeddings()
        hidden = hidden_states(self.model, inputs)
        return token_outputs(hidden, head.weight, head.bias, inputs.targets, temperature=self.temperature, wanted=outputs)


class ScalarModule(nn.Module):
    """Computes a number of the state at each source token, (S,) float32 or float64, under the name `output`."""

    def __init__(self, model: PreTrainedModel, *, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, inputs: ModelInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        weight = self.model.get_parameter(f"{SCALAR_HEAD}.weight")
        numbers = nn.functional.linear(hidden_states(self.model, inputs), weight).squeeze(-1)
        return {self.output: numbers if numbers.dtype == torch.float64 else numbers.float()}


def hidden_states(model: PreTrainedModel, inputs: ModelInputs) -> Tensor:
    """Returns last hidden states (S, hidden) at the source tokens."""
    extra: dict[str, Any] = {} if inputs.plan is None else {"packing": inputs.plan}
    outputs = backbone(model)(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        attention_mask=inputs.attention_mask,
        use_cache=False,
        **extra,
    )
    hidden: Tensor = outputs.last_hidden_state
    return hidden.flatten(0, 1).index_select(0, inputs.sources)
