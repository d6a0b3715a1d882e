"""Decoding steps of dense Llama-like models in few operations: fused projections, no module calls, in-place residuals.

With few rows, much of a step of Hugging Face's modules is dispatch.  Here query, key and value projections share one
storage and so do the gate and up projections; the model's own parameters are views of it, so there is one copy of every
weight, and writing the parameters changes what is read here.

Only models made of exactly the module types below are taken; everything else keeps its own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
COMMON_TYPES = {
    "torch.nn.modules.activation.SiLU",
    "torch.nn.modules.container.ModuleList",
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.sparse.Embedding",
    "transformers.activations.SiLUActivation",
}
STATIC_ROPES = {"default", "linear", "llama3", "yarn"}  # angles that depend on the position alone, not on the longest sequence


def why_not_lean(model: PreTrainedModel) -> str | None:
    """What in the model this file does not know; None if nothing."""
    name = _type_name(model)
    family = next((family for family in FAMILIES if name in _family_types(family)), None)
    if family is None:
        return f"{name} is of none of the families {', '.join(FAMILIES)}"
    unknown = {_type_name(module) for module in model.modules()} - _family_types(family) - COMMON_TYPES
    if unknown:
        return f"it has modules of other types: {', '.join(sorted(unknown))}"
    rotary, width = model.get_decoder().rotary_emb, model.get_decoder().layers[0].self_attn.head_dim
    if rotary.rope_type not in STATIC_ROPES or 2 * rotary.inv_freq.numel() != width:
        return f"its rotary embedding is of type {rotary.rope_type}, over {2 * rotary.inv_freq.numel()} of {width} numbers"
    return None


def _type_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _family_types(family: str) -> set[str]:
    name = family.lower()
    return {f"transformers.models.{name}.modeling_{name}.{family}{part}" for part in PARTS}


class LeanStep:
    """A decoding step over the weights of `model`, of which `why_not_lean` found nothing to say; see `DecodeStep`."""

    def __init__(self, model: PreTrainedModel, max_model_len: int) -> None:
        decoder = model.get_decoder()
        attention = decoder.layers[0].self_attn
        self._embed, self._lm_head, self._norm = decoder.embed_tokens, model.lm_head, _Norm(decoder.norm)
        self._layers = [_take_layer(layer) for layer in decoder.layers]
        joined = [(layer.qkv, layer.qkv_bias, layer.gate_up, layer.gate_up_bias) for layer in self._layers]
        self.fused: Sequence[Tensor] = [tensor for tensors in joined for tensor in tensors if tensor is not None]
        self._angles = _angle_table(model, max_model_len)
        self._width, self._scale, self._group = attention.head_dim, attention.scaling, attention.num_key_value_groups
        self._kv_heads = attention.k_proj.out_features // self._width
        self._heads = self._kv_heads * self._group

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Cache, mask: Tensor | None) -> Tensor:
        hidden = self._embed(tokens)
        cos, sin = self._angles[positions].unsqueeze(2).unbind(1)
        for layer, memory in zip(self._layers, cache.layers, strict=True):
            query, key, value = self._project(layer, hidden, cos, sin)
            keys, values = memory.update(key, value)
            mixed = scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=self._scale)
            _add_product(hidden, mixed.flatten(1), layer.out, layer.out_bias)
            _add_mlp(hidden, layer)
        return linear(self._norm(hidden), self._lm_head.weight, self._lm_head.bias)

    def _project(self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """query (rows, kv heads, group, width), as `grouped_attention` takes it; key and value (rows, kv heads, 1, width)."""
        rows, kv_heads, width = len(hidden), self._kv_heads, self._width
        heads = linear(layer.attention_norm(hidden), layer.qkv, layer.qkv_bias).view(rows, -1, width)
        query, key, value = heads.split_with_sizes([self._heads, kv_heads, kv_heads], dim=1)
        if layer.head_norms is not None:
            for part, norm in zip((query, key), layer.head_norms, strict=True):
                part.copy_(norm(part))
        _rotate(heads.narrow(1, 0, self._heads + kv_heads), cos, sin)
        return query.view(rows, kv_heads, self._group, width), key.unsqueeze(2), value.unsqueeze(2)


class _Norm:
    """RMSNorm with the weight of a module.

    torch has one kernel for it on accelerators, but about 20 operations on CPU; float32 and float64 take five here.
    """

    def __init__(self, module: Any) -> None:
        self._weight: Tensor = module.weight
        self._eps: float = module.variance_epsilon
        self._plain = self._weight.device.type == "cpu" and self._weight.dtype in (torch.float32, torch.float64)
        self._eps_tensor = torch.tensor(self._eps, dtype=self._weight.dtype) if self._plain else None

    def __call__(self, inputs: Tensor) -> Tensor:
        if self._eps_tensor is None:
            return rms_norm(inputs, self._weight.shape, self._weight, self._eps)
        length = torch.linalg.vector_norm(inputs, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_tensor, length, length, value=1 / inputs.shape[-1]).rsqrt_()
        return (inputs * scale).mul_(self._weight)


@dataclass(slots=True, frozen=True, kw_only=True)
class _Layer:
    """One decoder layer.  Weights are (outputs, inputs) as in nn.Linear; qkv and gate_up are stacked along the outputs."""

    attention_norm: _Norm
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: tuple[_Norm, _Norm] | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: _Norm
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def _take_layer(layer: Any) -> _Layer:
    """The layer's weights, with its parallel projections moved into common storages."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _fuse([attention.q_proj, attention.k_proj, attention.v_proj])
    gate_up, gate_up_bias = _fuse([mlp.gate_proj, mlp.up_proj])
    normed = _type_name(attention) in _family_types("Qwen3")
    return _Layer(
        attention_norm=_Norm(layer.input_layernorm),
        qkv=qkv,
        qkv_bias=qkv_bias,
        head_norms=(_Norm(attention.q_norm), _Norm(attention.k_norm)) if normed else None,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        mlp_norm=_Norm(layer.post_attention_layernorm),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
    )


def _fuse(projections: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """One weight (and bias) that computes all projections; their parameters become views of it."""
    weight = _share([projection.weight for projection in projections])
    biases = [projection.bias for projection in projections if projection.bias is not None]
    return weight, _share(biases) if biases else None


def _share(parameters: Sequence[Tensor]) -> Tensor:
    storage = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, view in zip(parameters, storage.split_with_sizes([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = view
    return storage


def _angle_table(model: PreTrainedModel, max_positions: int) -> Tensor:
    """(positions, 2, width): cosines, and sines negated in their first half; from the model's own rotary embedding."""
    positions = torch.arange(max_positions, device=model.device)[None]
    like = torch.empty(0, dtype=model.dtype, device=model.device)
    cos, sin = (angles[0] for angles in model.get_decoder().rotary_emb(like, positions))
    first, second = sin.chunk(2, dim=-1)
    return torch.stack([cos, torch.cat([-first, second], dim=-1)], dim=1)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding in place; heads (rows, heads, width), cos and sin (rows, 1, width) as in `_angle_table`."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cos).addcmul_(swapped, sin)


def _add_mlp(hidden: Tensor, layer: _Layer) -> None:
    """The widest product is computed as (outputs, rows), where BLAS needs less for its weight whatever the number of rows; gate
    and up are then contiguous."""
    inputs = layer.mlp_norm(hidden).t()
    if layer.gate_up_bias is None:
        both = torch.mm(layer.gate_up, inputs)
    else:
        both = torch.addmm(layer.gate_up_bias.unsqueeze(1), layer.gate_up, inputs)
    gate, up = both.chunk(2)
    _add_product(hidden, silu(gate, inplace=True).mul_(up).t(), layer.down, layer.down_bias)


def _add_product(hidden: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    hidden.addmm_(inputs, weight.t())
    if bias is not None:
        hidden.add_(bias)
