"""Low-rank adapters (Hu et al., arXiv 2106.09685) in Megatron-core's linear layers, those of peft to the letter.

Each Hugging Face layer has its own A (rank, in) and B (out, rank), also where Megatron fuses several into one matrix.  Where
tensor-parallel ranks cut a layer's outputs (query, key, value, gate, up), each has all of A and its rows of B; where they cut its
inputs (attention output, down), its columns of A and all of B.  Between A and B there are `rank` numbers a token, and the only
communication is of these: summed over the ranks, forward where inputs are cut and backward where outputs are.  Under sequence
parallelism the same sums gather or scatter the tokens, and what every rank has all of sees a part of them: its gradient is
marked for `finalize_model_grads` to add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn.functional import linear

from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.hf import SCALAR_HEAD, ModelKind
from rlhub.models.lora import PEFT_MODEL, SIDES, is_adapted, read_adapter, saved_name, scaling_of
from rlhub.models.megatron.model import BuiltMegatron
from rlhub.models.shape import POLICIES

ADAPTERS = "adapters"
"""The name under which a linear layer of Megatron's has its adapters."""
LAYERS = {
    "self_attention.linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "self_attention.linear_proj": ("o_proj",),
    "mlp.linear_fc1": ("gate_proj", "up_proj"),
    "mlp.linear_fc2": ("down_proj",),
}
"""Megatron's linear layers, in the model's order, with the Hugging Face layers that each has; experts get no adapters."""
INPUTS_CUT = ("o_proj", "down_proj")
"""The layers of which tensor-parallel ranks have columns."""


@dataclass(slots=True, kw_only=True, frozen=True)
class AdaptedLayer:
    """A Hugging Face layer: its full name, the part of Megatron's layer `place` that it is, and its full sizes."""

    name: str
    place: str
    number: int
    rows: int
    columns: int

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]


class LowRank(nn.Module):
    """This rank's part of one layer's adapter.

    weight_name, shape: of the frozen Hugging Face weight; first_row, first_column: where B's rows and A's columns begin in it.
    by_columns: True if ranks cut A's columns, and not B's rows.
    """

    def __init__(self, layer: AdaptedLayer, low: Tensor, dtype: torch.dtype) -> None:
        """low: all of A (rank, in)."""
        super().__init__()
        self.shape = (layer.rows, layer.columns)
        rank, size = int(parallel_state.get_tensor_model_parallel_rank()), _tensor_size()
        self.by_columns = layer.short in INPUTS_CUT
        columns = layer.columns // size if self.by_columns else layer.columns
        rows = layer.rows if self.by_columns else layer.rows // size
        self.weight_name = f"{layer.name}.weight"
        self.first_column = rank * columns if self.by_columns else 0
        self.first_row = 0 if self.by_columns else rank * rows
        own = low[:, self.first_column : self.first_column + columns]
        self.lora_A = nn.Parameter(own.to(dtype, copy=True, memory_format=torch.contiguous_format))
        self.lora_B = nn.Parameter(torch.zeros(rows, low.shape[0], dtype=dtype))


class Adapters(nn.ModuleDict):
    """The adapters of one of Megatron's linear layers, by the names of the Hugging Face layers in it.

    widths: this rank's outputs of each of those layers; groups: the number of groups in which they are interleaved.
    """

    def __init__(self, widths: dict[str, int], *, groups: int, scaling: float, sequence_parallel: bool) -> None:
        super().__init__()
        self.widths, self.groups, self.scaling, self.sequence_parallel = widths, groups, scaling, sequence_parallel
        self.enabled = True

    @property
    def own(self) -> dict[str, LowRank]:
        """Returns the adapters by name, with their type."""
        return {name: part for name, part in self.items() if isinstance(part, LowRank)}

    def added(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """Returns the layer's outputs (tokens, 1, out) with those of the adapters for its inputs (tokens, 1, in)."""
        own = self.own
        low = linear(inputs, torch.cat([part.lora_A for part in own.values()]))
        parts = self._summed(low).chunk(len(own), -1)
        found = {name: linear(part, own[name].lora_B) for name, part in zip(own, parts, strict=True)}
        tokens = outputs.shape[:-1]
        wide = [found[name] if name in found else outputs.new_zeros(*tokens, size) for name, size in self.widths.items()]
        change = torch.cat([torch.unflatten(one, -1, (self.groups, -1)) for one in wide], -1).flatten(-2)
        return torch.add(outputs, change, alpha=self.scaling)

    def _summed(self, low: Tensor) -> Tensor:
        """Returns A's outputs as B needs them, summed over the tensor-parallel ranks forward or backward."""
        summed: Tensor
        if next(iter(self)) in INPUTS_CUT:
            reduce = (
                reduce_scatter_to_sequence_parallel_region if self.sequence_parallel else reduce_from_tensor_model_parallel_region
            )
            summed = reduce(low)
        elif self.sequence_parallel:
            summed = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        else:
            summed = copy_to_tensor_model_parallel_region(low)
        return summed


def add_lora(built: BuiltMegatron, config: ModelConfig, kind: ModelKind, *, seed: int, trainable: bool) -> None:
    """Freezes the model and adds adapters to its linear layers, with A random and B zero or both from model.lora_adapter_path.

    Every rank calls it.  Raises ConfigError if target_modules names no layer that can have an adapter.

    seed: determines A, which is the FSDP engine's for the same model.
    """
    layers = _adapted_layers(built, config)
    lows = _drawn(layers, config.lora_rank, seed)
    scaling, parallel = scaling_of(config), bool(built.config.sequence_parallel)
    for chunk in built.chunks:
        chunk.requires_grad_(False)
        for linear_layer, place, prefix in _linears(chunk):
            own = [layer for layer in layers if layer.place == place and layer.name.startswith(prefix)]
            if own:
                adapters = _adapters(place, built, scaling=scaling, sequence_parallel=parallel)
                for layer in own:
                    adapters[layer.short] = LowRank(layer, lows[layer.name], built.config.params_dtype)
                _attach(linear_layer, adapters)
                adapters.to(next(linear_layer.parameters()).device).requires_grad_(trainable)
        if kind not in POLICIES and chunk.post_process:
            chunk.score.requires_grad_(trainable)  # new or tiny, so it is trained without adapters
        if trainable and chunk.pre_process:  # recomputed layers must have an input that takes a gradient
            chunk.embedding.register_forward_hook(lambda _, __, hidden: hidden.requires_grad_(torch.is_grad_enabled()))
    if config.lora_adapter_path is not None:
        _load(built, layers, config, kind)


def low_ranks(chunks: list[Any]) -> Iterator[LowRank]:
    """Yields the adapters of all layers of this rank."""
    return (module for chunk in chunks for module in chunk.modules() if isinstance(module, LowRank))


def set_adapters(chunks: list[Any], enabled: bool) -> None:
    """Switches all adapters on or off in the computation."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Adapters):
                module.enabled = enabled


def _attach(linear_layer: nn.Module, adapters: Adapters) -> None:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
        return (adapters.added(inputs[0], outputs[0]), outputs[1]) if adapters.enabled else outputs

    linear_layer.add_module(ADAPTERS, adapters)
    linear_layer.register_forward_hook(hook)
    for part in adapters.own.values():
        whole = part.lora_B if part.by_columns else part.lora_A
        whole.sequence_parallel = adapters.sequence_parallel  # type: ignore[attr-defined]


def _adapters(place: str, built: BuiltMegatron, **options: Any) -> Adapters:
    """Returns empty adapters for one of Megatron's layers."""
    config, size = built.config, _tensor_size()
    groups = config.num_query_groups // size if place == "self_attention.linear_qkv" else 1
    rows, names = _rows(built), LAYERS[place]
    widths = {name: rows[name] if name in INPUTS_CUT else rows[name] // size for name in names}
    return Adapters(widths, groups=groups, **options)


def _tensor_size() -> int:
    return int(parallel_state.get_tensor_model_parallel_world_size())


def _rows(built: BuiltMegatron) -> dict[str, int]:
    """Returns the full number of outputs of each Hugging Face layer."""
    config = built.config
    key = config.num_query_groups * config.kv_channels
    query, hidden, wide = config.num_attention_heads * config.kv_channels, config.hidden_size, config.ffn_hidden_size
    return {
        "q_proj": query, "k_proj": key, "v_proj": key, "o_proj": hidden, "gate_proj": wide, "up_proj": wide, "down_proj": hidden
    }  # fmt: skip


def _adapted_layers(built: BuiltMegatron, config: ModelConfig) -> list[AdaptedLayer]:
    """Returns the layers of the whole model that get adapters, in the order of the Hugging Face model."""
    sizes, rows = built.config, _rows(built)
    columns = dict.fromkeys(rows, sizes.hidden_size) | {"o_proj": rows["q_proj"], "down_proj": sizes.ffn_hidden_size}
    sparse = list(sizes.moe_layer_freq) if sizes.num_moe_experts else [0] * sizes.num_layers
    found = []
    for number in range(sizes.num_layers):
        for place, names in LAYERS.items():
            block = "self_attn" if place.startswith("self") else "mlp"
            if block == "mlp" and sparse[number]:
                continue
            found += [
                AdaptedLayer(
                    name=f"model.layers.{number}.{block}.{name}",
                    place=place,
                    number=number,
                    rows=rows[name],
                    columns=columns[name],
                )
                for name in names
            ]
    wanted = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules
    unknown = [one for one in wanted if one != "all-linear" and not any(is_adapted(layer.name, [one]) for layer in found)]
    if unknown or not wanted:
        known = ", ".join(sorted({layer.short for layer in found}))
        raise ConfigError(f"model.target_modules: no linear layer is named {unknown}; with strategy=megatron there are {known}")
    return [layer for layer in found if is_adapted(layer.name, config.target_modules)]


def _drawn(layers: list[AdaptedLayer], rank: int, seed: int) -> dict[str, Tensor]:
    """Draws A of every layer as peft does, which draws both matrices when it creates them and A once more."""
    lows = {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        for layer in layers:
            low, _ = nn.Linear(layer.columns, rank, bias=False), nn.Linear(rank, layer.rows, bias=False)
            lows[layer.name] = nn.init.kaiming_uniform_(low.weight, a=math.sqrt(5)).detach()
    return lows


def _linears(chunk: Any) -> Iterator[tuple[nn.Module, str, str]]:
    """Yields the dense linear layers of a piece of the model, each with its place and the prefix of its names."""
    for layer in chunk.decoder.layers:
        modules = dict(layer.named_modules())
        for place in LAYERS:
            if place in modules:
                yield modules[place], place, f"model.layers.{layer.layer_number - 1}."


def _load(built: BuiltMegatron, layers: list[AdaptedLayer], config: ModelConfig, kind: ModelKind) -> None:
    """Fills this rank's parts from the files of model.lora_adapter_path."""
    rank, score = config.lora_rank, f"{PEFT_MODEL}{SCALAR_HEAD}.weight"
    shapes: dict[str, tuple[int, ...]] = {} if kind in POLICIES else {score: (1, built.config.hidden_size)}
    for layer in layers:
        shapes |= {saved_name(layer.name, "A"): (rank, layer.columns), saved_name(layer.name, "B"): (layer.rows, rank)}
    tensors = read_adapter(config, shapes)
    with torch.no_grad():
        for part in low_ranks(built.chunks):
            low, high = (tensors[saved_name(part.weight_name.removesuffix(".weight"), side)] for side in SIDES)
            part.lora_A.copy_(low[:, part.first_column :][:, : part.lora_A.shape[1]])
            part.lora_B.copy_(high[part.first_row :][: part.lora_B.shape[0]])
        for chunk in built.chunks if kind not in POLICIES else ():
            if chunk.post_process:
                chunk.score.weight.copy_(tensors[score])
