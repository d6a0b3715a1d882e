"""Megatron parameters as parts of Hugging Face tensors, by their names.

Megatron fuses query, key and value (group by group: the group's queries, its key, its value) and the two halves of a gated
feed-forward layer, cuts rows or columns over tensor-parallel ranks, pads the vocabulary, numbers layers and experts from each
rank's first, and keeps a second copy of tied embeddings.  All of it comes down to boxes, with which loading, weight sync
and checkpoints work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
from megatron.core import parallel_state
from torch import nn

from rlhub.models.megatron.model import BuiltMegatron
from rlhub.protocol.weights.regions import Region, whole


@dataclass(slots=True, kw_only=True, frozen=True)
class TensorPart:
    """A box of a parameter that is a box of a named tensor, of the same sizes.

    local: in the parameter.  region: in the tensor `name` of full size `shape`.
    """

    local: Region
    name: str
    shape: tuple[int, ...]
    region: Region


@dataclass(slots=True, kw_only=True)
class ParamParts:
    """A parameter of this rank and its parts; elements that no part covers are padding.  key: unique on this rank."""

    key: str
    param: nn.Parameter
    parts: list[TensorPart]


@dataclass(slots=True, kw_only=True, frozen=True)
class _Share:
    """One rank's place among those that cut a tensor."""

    rank: int
    size: int


def parts(built: BuiltMegatron) -> Iterator[ParamParts]:
    """Yields an entry for each parameter of this rank, in the model's order."""
    for number, chunk in enumerate(built.chunks):
        for key, param in chunk.named_parameters():
            yield ParamParts(key=f"{number}.{key}", param=param, parts=_Namer(built, number).parts(key, param))


class _Namer:
    """Takes the parameters of one piece of the model apart."""

    def __init__(self, built: BuiltMegatron, number: int) -> None:
        self.built = built
        self.chunk = built.chunks[number]
        self.dense = _Share(
            rank=parallel_state.get_tensor_model_parallel_rank(), size=parallel_state.get_tensor_model_parallel_world_size()
        )
        self.expert = _Share(
            rank=parallel_state.get_expert_tensor_parallel_rank(), size=parallel_state.get_expert_tensor_parallel_world_size()
        )
        self.by_place: dict[str, Callable[[str, nn.Parameter], list[TensorPart]]] = {
            "self_attention.linear_qkv": self._fused_attention,
            "self_attention.linear_proj": lambda name, param: self._columns(f"{name}self_attn.o_proj.weight", param, self.dense),
            "self_attention.q_layernorm": lambda name, param: _all(f"{name}self_attn.q_norm.weight", param),
            "self_attention.k_layernorm": lambda name, param: _all(f"{name}self_attn.k_norm.weight", param),
            "input_layernorm": lambda name, param: _all(f"{name}input_layernorm.weight", param),
            "pre_mlp_layernorm": lambda name, param: _all(f"{name}post_attention_layernorm.weight", param),
            "mlp.router": lambda name, param: _all(f"{name}mlp.gate.weight", param),
            "mlp.linear_fc1": lambda name, param: self._gate_and_up(f"{name}mlp", param, self.dense),
            "mlp.linear_fc2": lambda name, param: self._columns(f"{name}mlp.down_proj.weight", param, self.dense),
        }

    def parts(self, key: str, param: nn.Parameter) -> list[TensorPart]:
        """Returns the parts of a parameter.  key: its name in the piece."""
        match key.split("."):
            case ["embedding", *_]:
                return self._vocabulary("model.embed_tokens.weight", param)
            case ["output_layer", *_]:
                tied = self.chunk.share_embeddings_and_output_weights
                return self._vocabulary("model.embed_tokens.weight" if tied else "lm_head.weight", param)
            case ["score", *_]:
                return _all("score.weight", param)
            case ["decoder", "final_layernorm", *_]:
                return _all("model.norm.weight", param)
            case ["decoder", "layers", index, *place, _]:
                layer = self.chunk.decoder.layers[int(index)].layer_number - 1  # Megatron counts all layers from 1
                return self._layer(f"model.layers.{layer}.", place, param, key)
        raise AssertionError(f"{key}: a parameter that no Hugging Face tensor is known for")

    def _layer(self, name: str, place: list[str], param: nn.Parameter, key: str) -> list[TensorPart]:
        match place:
            case ["mlp", "experts", "local_experts", index, matrix]:
                experts = parallel_state.get_expert_model_parallel_rank() * self._experts_a_rank()
                name = f"{name}mlp.experts.{experts + int(index)}"
                if matrix == "linear_fc1":
                    return self._gate_and_up(name, param, self.expert)
                return self._columns(f"{name}.down_proj.weight", param, self.expert)
        if key.endswith("linear_qkv.bias"):
            return self._fused_attention(name, param, "bias")
        return self.by_place[".".join(place)](name, param)

    def _experts_a_rank(self) -> int:
        return int(self.built.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size())

    def _vocabulary(self, name: str, param: nn.Parameter) -> list[TensorPart]:
        """Returns rows of the padded vocabulary; the last rank's surplus rows, or all of them, are padding."""
        rows, width = param.shape
        first = self.dense.rank * rows
        real = min(first + rows, self.built.vocab_size) - first
        if real <= 0:
            return []
        shape = (self.built.vocab_size, width)
        return [TensorPart(local=((0, real), (0, width)), name=name, shape=shape, region=((first, first + real), (0, width)))]

    def _columns(self, name: str, param: nn.Parameter, share: _Share) -> list[TensorPart]:
        rows, width = param.shape
        first = share.rank * width
        region = ((0, rows), (first, first + width))
        return [TensorPart(local=whole(param.shape), name=name, shape=(rows, width * share.size), region=region)]

    def _gate_and_up(self, name: str, param: nn.Parameter, share: _Share) -> list[TensorPart]:
        """Returns the rank's rows of the gate above its rows of the other factor."""
        rows, width = param.shape[0] // 2, param.shape[1]
        first = share.rank * rows
        return [
            TensorPart(
                local=((half * rows, (half + 1) * rows), (0, width)),
                name=f"{name}.{factor}_proj.weight",
                shape=(rows * share.size, width),
                region=((first, first + rows), (0, width)),
            )
            for half, factor in enumerate(("gate", "up"))
        ]

    def _fused_attention(self, name: str, param: nn.Parameter, entry: str = "weight") -> list[TensorPart]:
        """Returns rows of the rank's query groups, one after the other: queries, key, value."""
        config = self.built.config
        heads, groups, width = config.num_attention_heads, config.num_query_groups, config.kv_channels
        queries = heads // groups
        sizes = {"q": queries * width, "k": width, "v": width}  # rows in a group
        own = groups // self.dense.size
        rest = whole(param.shape[1:])
        found, row = [], 0
        for group in range(self.dense.rank * own, (self.dense.rank + 1) * own):
            for matrix, size in sizes.items():
                found.append(
                    TensorPart(
                        local=((row, row + size), *rest),
                        name=f"{name}self_attn.{matrix}_proj.{entry}",
                        shape=(groups * size, *param.shape[1:]),
                        region=((group * size, (group + 1) * size), *rest),
                    )
                )
                row += size
        assert row == param.shape[0], (name, row, tuple(param.shape))
        return found


def _all(name: str, param: nn.Parameter) -> list[TensorPart]:
    shape = tuple(param.shape)
    return [TensorPart(local=whole(shape), name=name, shape=shape, region=whole(shape))]
