"""Building an engine's parts: the sharded model with its weights, the root modules that are sharded, and AdamW on each rank's
rows.

A small model is read by every rank.  A large one is read by rank 0 alone: all ranks shard an empty model and then receive it
weight by weight, so no rank but 0 ever has more than its shard and one tensor in memory.

FSDP gathers a module's weights when its forward is called, so the head's matrix must be used inside the root's forward.  A
root module therefore is a Hugging Face model whose forward ends in numbers per target, not logits.

The optimizer steps plain local tensors that alias the shards.  This avoids the dispatch through distributed tensors for each
parameter, and gives the optimizer's state the form of a checkpoint, which any ranks of any backend can read or write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhub.config.sections.training import ModelConfig, OptimConfig, Recompute
from rlhub.config.sections.vla import FLOW, VLAConfig, vla_of
from rlhub.engines.training.fsdp.blocks import prepare_blocks
from rlhub.engines.training.fsdp.logprob import token_outputs
from rlhub.engines.training.fsdp.weights import Layout, ShardedParam, num_bytes, shard_model, sharded_params
from rlhub.engines.training.optimizer import HOST, MOMENTS, EngineOptimizer, HostTensors
from rlhub.engines.training.packing import ModelInputs
from rlhub.errors import ConfigError, EngineError
from rlhub.models.experts import unfused
from rlhub.models.hf import SCALAR_HEAD, ModelKind, backbone, build_model, load_config
from rlhub.models.lora import add_lora, load_adapter, named_parameters
from rlhub.models.packed_attention import PACKED_ATTENTION
from rlhub.models.prefix_attention import PREFIX_ATTENTION
from rlhub.models.shape import POLICIES, prefix_problems
from rlhub.models.vision import input_embeddings, reads_images
from rlhub.models.vla import flow, policy
from rlhub.protocol.weights.pieces import Piece, whole

BROADCAST_BYTES = 1 << 30
"""Larger models are read by rank 0 alone."""


@dataclass(slots=True, kw_only=True, frozen=True)
class BuildPlan:
    """The model to build.

    kind: determines the head.
    dtype: the dtype of the master weights.
    temperature: divides a policy's logits.
    trainable: False freezes all weights.
    seed: determines new weights.
    share_prefixes: True computes attention over rows that share prefixes.
    recompute: what a backward pass computes again, by `prepare_blocks`.
    compiled: True compiles the blocks, and the head's arithmetic.
    """

    model: ModelConfig
    kind: ModelKind
    dtype: torch.dtype
    temperature: float
    trainable: bool
    seed: int
    share_prefixes: bool = False
    recompute: Recompute = "none"
    compiled: bool = False


@dataclass(slots=True, kw_only=True)
class BuiltModel:
    """The parts of a built model.

    root: the module that is called and sharded as a whole.
    model: the Hugging Face model inside it.
    params: the model's weights.
    """

    root: nn.Module
    model: PreTrainedModel
    params: list[ShardedParam]


def build_sharded(plan: BuildPlan, layout: Layout, device: torch.device) -> BuiltModel:
    """Builds the sharded model; every rank calls it.  Raises ConfigError for an unusable model or unusable target_modules."""
    broadcast = False
    if layout.mesh is not None and dist.get_world_size() > 1:
        empty = _prepared(plan, empty=True)
        broadcast = num_bytes(empty.parameters()) > BROADCAST_BYTES
    model = empty if broadcast else _prepared(plan).to(device)
    root = _root(model, plan)
    prepare_blocks(model, plan.recompute, compiled=plan.compiled)
    compute_dtype = torch.bfloat16 if device.type == "cuda" and plan.dtype == torch.float32 else None
    shard_model(root, model, layout, compute_dtype)
    if broadcast:
        root.to_empty(device=device)
        _receive(model, _prepared(plan) if dist.get_rank() == 0 else None, layout, device)
    return BuiltModel(root=root, model=model, params=sharded_params(model, layout))


def _root(model: PreTrainedModel, plan: BuildPlan) -> nn.Module:
    if plan.kind == "policy":
        return PolicyModule(model, temperature=plan.temperature, compiled=plan.compiled)
    if plan.kind == "vla":
        vla = vla_of(plan.model)
        assert vla is not None, "the kind follows from it"
        if vla.decoding == FLOW:
            return FlowModule(model, vla)
        return VLAModule(model, vla, temperature=plan.temperature)
    return ScalarModule(model, output="values" if plan.kind == "value" else "scores")


def _prepared(plan: BuildPlan, *, empty: bool = False) -> PreTrainedModel:
    packed = PREFIX_ATTENTION if plan.share_prefixes else PACKED_ATTENTION
    is_packed = plan.model.use_remove_padding and plan.kind != "vla" and not reads_images(load_config(plan.model))
    attention = packed if is_packed else None
    model = build_model(plan.model, plan.kind, dtype=plan.dtype, attention=attention, seed=plan.seed, empty=empty)
    if plan.share_prefixes and (problems := prefix_problems(model.config.to_dict(), plan.model.override_config)):
        raise ConfigError([f"actor.prefix_packing=true: {problem}; set it to false" for problem in problems])
    if plan.model.lora_rank > 0:
        scalar = plan.kind not in POLICIES
        head: nn.Module = model.get_submodule(SCALAR_HEAD) if scalar else model.get_output_embeddings()
        add_lora(model, plan.model, head=head, seed=plan.seed)
        if plan.model.lora_adapter_path is not None and not empty:
            load_adapter(model, plan.model, plan.kind)
        head.requires_grad_(scalar)  # a scalar head is new or tiny, so it is trained without adapters
    if not plan.trainable:
        model.requires_grad_(False)
    return model


@torch.no_grad()
def _receive(model: PreTrainedModel, source: PreTrainedModel | None, layout: Layout, device: torch.device) -> None:
    """Fills `model` from rank 0's `source`, including buffers: rotary frequencies are in no checkpoint."""
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
    """Computes log-probs of the targets, and entropy and sum of squared probabilities of their distributions, (S,) each,
    float32 or float64."""

    def __init__(self, model: PreTrainedModel, *, temperature: float, compiled: bool = False) -> None:
        super().__init__()
        self.model, self.temperature, self.compiled = model, temperature, compiled

    def forward(self, inputs: ModelInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        head = self.model.get_output_embeddings()
        hidden = hidden_states(self.model, inputs)
        return token_outputs(
            hidden,
            head.weight,
            head.bias,
            inputs.targets,
            temperature=self.temperature,
            wanted=outputs,
            compiled=self.compiled,
        )


class VLAModule(nn.Module):
    """Computes the outputs of PolicyModule over the action tokens, and `values`, (S,) each, float32 or float64."""

    def __init__(self, model: PreTrainedModel, vla: VLAConfig, *, temperature: float) -> None:
        super().__init__()
        self.model, self.vla, self.temperature = model, vla, temperature

    def forward(self, inputs: ModelInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        assert inputs.placed is not None and inputs.images is not None
        hidden = policy.hidden_states(self.model, self.vla, inputs.placed, inputs.images).index_select(0, inputs.sources)
        found: dict[str, Tensor] = {}
        if outputs - {"values"}:
            weight, bias = policy.bin_head(self.model, self.vla)
            found = token_outputs(hidden, weight, bias, inputs.targets, temperature=self.temperature, wanted=outputs)
        return found | ({"values": policy.values_of(self.model, self.vla, hidden)} if "values" in outputs else {})


class FlowModule(nn.Module):
    """Computes `flow_errors`, (S,) float32 or float64, of the numbers of actions."""

    def __init__(self, model: PreTrainedModel, vla: VLAConfig) -> None:
        super().__init__()
        self.model, self.vla = model, vla

    def forward(self, inputs: ModelInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        if outputs != {"flow_errors"}:
            raise EngineError(f"model.vla.decoding=flow gives flow_errors only, not {sorted(outputs)}: it has no log-probs")
        assert inputs.flow is not None and inputs.images is not None
        errors = flow.flow_errors(self.model, self.vla, inputs.flow, inputs.images)
        return {"flow_errors": errors.flatten().index_select(0, inputs.sources)}


class ScalarModule(nn.Module):
    """Computes one number from the hidden state at each source token, (S,) float32 or float64, under the name `output`."""

    def __init__(self, model: PreTrainedModel, *, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, inputs: ModelInputs, outputs: frozenset[str]) -> dict[str, Tensor]:
        weight = self.model.get_parameter(f"{SCALAR_HEAD}.weight")
        numbers = nn.functional.linear(hidden_states(self.model, inputs), weight).squeeze(-1)
        return {self.output: numbers if numbers.dtype == torch.float64 else numbers.float()}


def hidden_states(model: PreTrainedModel, inputs: ModelInputs) -> Tensor:
    """Returns the last hidden states (S, hidden) at the source tokens."""
    extra: dict[str, Any] = {} if inputs.plan is None else {"packing": inputs.plan}
    read: dict[str, Tensor] = {"input_ids": inputs.input_ids, "position_ids": inputs.position_ids}
    if inputs.pictures is not None:
        embedded = input_embeddings(model, inputs.input_ids, inputs.pictures)
        read = {"inputs_embeds": embedded, "position_ids": inputs.pictures.position_ids}
    outputs = backbone(model)(**read, attention_mask=inputs.attention_mask, use_cache=False, **extra)
    hidden: Tensor = outputs.last_hidden_state
    return hidden.flatten(0, 1).index_select(0, inputs.sources)


class ShardedAdamW(EngineOptimizer):
    """AdamW whose norms and biases (weights of fewer than two dimensions) do not decay.

    offload: True creates the moments in host memory and brings them to the device only while `step` writes them.
    """

    def __init__(self, params: Sequence[ShardedParam], config: OptimConfig, layout: Layout, *, offload: bool = False) -> None:
        super().__init__(config)
        self.layout = layout
        self.shards = [TrainedShard(owner=p, leaf=nn.Parameter(p.local)) for p in params if p.param.requires_grad]
        decayed = [shard.leaf for shard in self.shards if shard.owner.param.dim() >= 2]
        others = [shard.leaf for shard in self.shards if shard.owner.param.dim() < 2]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )
        for shard in self.shards:
            leaf = shard.leaf
            device = HOST if offload else leaf.device
            self.adamw.state[leaf] = {name: torch.zeros_like(leaf, requires_grad=False, device=device) for name in MOMENTS}
            self.adamw.state[leaf]["step"] = torch.zeros((), dtype=torch.float32, device=leaf.device)
        self.hosted = HostTensors(self.moment(shard, name) for shard in self.shards if offload for name in MOMENTS)

    def moment(self, shard: TrainedShard, name: str) -> Tensor:
        """Returns exp_avg or exp_avg_sq of this rank's rows, live."""
        value: Tensor = self.adamw.state[shard.leaf][name]
        return value

    def rebind(self) -> None:
        """Points the leaves to the shards' memory, which changes when weights are loaded or offloaded."""
        for shard in self.shards:
            shard.leaf.data = shard.owner.local

    def set_num_steps(self, num_steps: int) -> None:
        self.num_steps = num_steps
        for shard in self.shards:
            self.adamw.state[shard.leaf]["step"].fill_(float(num_steps))

    @torch.no_grad()
    def grad_norm(self) -> float:
        norms = torch._foreach_norm([g for shard in self.shards if (g := shard.owner.local_grad) is not None])
        device = self.shards[0].leaf.device
        total = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)
        if self.layout.shard_group is not None:
            dist.all_reduce(total, group=self.layout.shard_group)
        return float(total.sqrt())

    @torch.no_grad()
    def apply(self, rate: float, scale: float | None) -> None:
        self.rebind()
        for shard in self.shards:
            shard.leaf.grad = shard.owner.local_grad
        if scale is not None:
            torch._foreach_mul_([shard.leaf.grad for shard in self.shards if shard.leaf.grad is not None], scale)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        with self.hosted.on_device(self.shards[0].leaf.device):
            self.adamw.step()
        for shard in self.shards:
            shard.leaf.grad = None


@dataclass(slots=True, kw_only=True)
class TrainedShard:
    """A trainable weight, and the leaf tensor with this rank's rows of it, which the optimizer steps."""

    owner: ShardedParam
    leaf: nn.Parameter


def live_pieces(params: Iterable[ShardedParam], optimizer: ShardedAdamW | None) -> Iterator[Piece]:
    """Yields this rank's rows of weights and moments, live, with each expert under its own name."""
    for param in params:
        yield from _rows(f"model.{param.name}", param.local, param)
    if optimizer is None:
        return
    optimizer.hosted.wait()
    for shard in optimizer.shards:
        for moment in MOMENTS:
            yield from _rows(f"optim.{moment}.{shard.owner.name}", optimizer.moment(shard, moment), shard.owner)


def _rows(name: str, local: Tensor, param: ShardedParam) -> Iterator[Piece]:
    region = ((param.offset, param.offset + local.shape[0]), *whole(param.global_shape[1:]))
    return unfused(Piece(name=name, tensor=local, shape=param.global_shape, region=region))


@torch.no_grad()
def fill(pieces: Iterable[Piece], read: Callable[[Piece], Tensor]) -> None:
    """Overwrites live tensors with the results of `read`, which is not called for pieces without rows."""
    for piece in pieces:
        if piece.tensor.numel():
            piece.tensor.copy_(read(piece))
