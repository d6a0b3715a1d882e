"""Building Megatron-core models from Hugging Face checkpoints: policies, and value and reward models with a scalar head.

Weights are read straight into Megatron parameters: each rank reads only its own boxes, from memory-mapped safetensors.

`param_parts` says which boxes of Hugging Face tensors a Megatron parameter consists of.  Megatron fuses query, key and value
(group by group: the group's queries, its key, its value) and the two halves of a gated feed-forward layer, cuts rows or
columns over tensor-parallel ranks, pads the vocabulary, numbers layers and experts from each rank's first, and keeps a second
copy of tied embeddings.  Loading, weight sync and checkpoints all work with these boxes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhub.models.megatron import compat  # before megatron, which it imports quietly

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from rlhub.config.sections.training import MegatronConfig, ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.hf import SCALAR_HEAD, ModelKind, check_weights, load_config
from rlhub.models.lora import ADAPTER
from rlhub.models.megatron.checks import megatron_problems, num_virtual_stages
from rlhub.models.megatron.lora import LowRank, add_lora
from rlhub.models.megatron.model import BuiltMegatron, MegatronLM, replay_in
from rlhub.models.megatron.transformer_config import make_transformer_config
from rlhub.models.required_weights import refuse_nonfinite
from rlhub.models.shape import reward_problem
from rlhub.models.weight_files import INDEX, SINGLE
from rlhub.protocol.weights.pieces import Region, take, whole

BASE = "model."
"""The prefix of names that a checkpoint of the transformer without a head lacks."""
LAYER = re.compile(r"(model\.layers\.\d+\.)(?!mlp\.experts\.).*(?<!inv_freq)")
"""Matches the tensors of a layer that every rank with the layer has a part of; a rank has only some of the experts."""


@dataclass(slots=True, kw_only=True)
class MegatronPlan:
    """The model to build.

    dtype: the dtype of the weights and of the computation.
    trainable: whether weights take gradients.
    seed: determines weights that the checkpoint lacks.
    device: the device of the weights.
    """

    model: ModelConfig
    kind: ModelKind
    megatron: MegatronConfig
    dtype: torch.dtype
    trainable: bool
    seed: int
    device: torch.device


def build_megatron(plan: MegatronPlan, *, load: bool = True) -> BuiltMegatron:
    """Builds this rank's part of the model with the checkpoint's weights.  Every rank calls it, after model parallelism is set
    up.

    load: False leaves the weights uninitialized.
    """
    hf_config = load_megatron_config(plan.model, plan.kind, plan.megatron)
    compat.install()
    config = make_transformer_config(
        hf_config,
        plan.megatron,
        dtype=plan.dtype,
        recompute=plan.model.enable_gradient_checkpointing and plan.trainable,
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
    )
    tensor = plan.megatron.tensor_model_parallel_size
    padded = -(-hf_config.vocab_size // tensor) * tensor
    built = BuiltMegatron(
        chunks=[
            MegatronLM(config, hf_config, plan.kind, padded_vocab_size=padded, **place).to(plan.device)
            for place in _places(num_virtual_stages(plan.megatron))
        ],
        config=config,
        hf_config=hf_config,
        vocab_size=hf_config.vocab_size,
    )
    compat.install()
    _seed_generators(plan)
    for chunk in built.chunks:
        chunk.requires_grad_(plan.trainable).train(plan.trainable)
    if load:
        check_weights(plan.model, plan.kind)
        load_weights(built, plan.model, plan.seed)
    if plan.model.lora_rank > 0:
        add_lora(built, plan.model, plan.kind, seed=plan.seed, trainable=plan.trainable)
    replay_in(built.chunks, config)
    return built


def load_megatron_config(model: ModelConfig, kind: ModelKind, megatron: MegatronConfig) -> PreTrainedConfig:
    """Loads the Hugging Face configuration.  Raises ConfigError with all problems that prevent building the model."""
    config = load_config(model)
    if kind == "reward" and (problem := reward_problem(str(model.path), config.architectures or [], config.num_labels)):
        raise ConfigError(problem)
    world = torch.distributed.get_world_size()
    if problems := megatron_problems(config.to_dict(), megatron, world):
        raise ConfigError(problems)
    return config


def _places(stages: int | None) -> list[dict[str, Any]]:
    """Returns the place in the model of each of this rank's pieces, in order."""
    rank, last = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size() - 1
    if stages is None:
        return [{"first": rank == 0, "last": rank == last, "stage": None}]
    return [
        {"first": rank == 0 and stage == 0, "last": rank == last and stage == stages - 1, "stage": stage}
        for stage in range(stages)
    ]


def _seed_generators(plan: MegatronPlan) -> None:
    """Creates Megatron's generators for dropout, which must exist although nothing is dropped; the process's own generators
    stay unchanged."""
    devices = [plan.device] if plan.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        model_parallel_cuda_manual_seed(plan.seed)


@torch.no_grad()
def load_weights(built: BuiltMegatron, model: ModelConfig, seed: int) -> None:
    """Fills this rank's parameters from the checkpoint; padding becomes zero.

    seed: determines a scalar head that the checkpoint lacks, which is then equal on all ranks and backends.  Raises
    ConfigError naming tensors that are missing, of another shape or not finite, or that the checkpoint has and the model does
    not.
    """
    checkpoint = HFCheckpoint(model)
    entries = list(param_parts(built))
    _check(checkpoint, entries)
    for entry in entries:
        entry.param.zero_()
        for part in entry.parts:
            stored = checkpoint.stored_name(part.name)
            if stored is None:
                entry.param.copy_(_drawn_head(built, seed))
            else:
                take(entry.param, part.local).copy_(checkpoint.read(stored, part.region))
    loaded = ((part.name, take(entry.param, part.local)) for entry in entries for part in entry.parts)
    refuse_nonfinite(checkpoint.path, loaded)


def _drawn_head(built: BuiltMegatron, seed: int) -> Tensor:
    """Draws a new scalar head as transformers does for `rlhub.models.hf.build_model`; the process's generator stays unchanged."""
    generator = torch.Generator().manual_seed(seed)
    head = nn.Parameter(torch.empty(1, built.hf_config.hidden_size), requires_grad=False)
    return head.normal_(0.0, built.hf_config.initializer_range, generator=generator)


def _check(checkpoint: HFCheckpoint, entries: Iterable[ParamParts]) -> None:
    """Compares names and shapes with this rank's parameters; raises ConfigError for a difference."""
    shapes = {part.name: part.shape for entry in entries for part in entry.parts}
    missing, other = [], []
    for name, shape in shapes.items():
        stored = checkpoint.stored_name(name)
        if stored is None:
            missing += [name] if name != f"{SCALAR_HEAD}.weight" else []
        elif checkpoint.shape(stored) != shape:
            other.append(f"{name} is {checkpoint.shape(stored)}, not {shape}")
    layers = {match[1] for name in shapes if (match := LAYER.fullmatch(name))}
    surplus = [
        name
        for name in checkpoint.file_of
        if (match := LAYER.fullmatch(BASE + name.removeprefix(BASE))) and match[1] in layers and match[0] not in shapes
    ]
    problems = {"lacks": missing, "has other shapes:": other, "has tensors this model type knows nothing of:": surplus}
    if found := [f"{what} {_some(names)}" for what, names in problems.items() if names]:
        raise ConfigError(
            f"the checkpoint {checkpoint.path!r} does not fit its config.json: it {'; it '.join(found)}; use another checkpoint"
        )


def _some(names: list[str]) -> str:
    """Lists the first few names, and the number of the others."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class HFCheckpoint:
    """The tensors of a model folder or hub model, by name.  Files stay open as long as this object lives."""

    def __init__(self, model: ModelConfig) -> None:
        assert model.path is not None, "checked when the configuration is loaded"
        self.path = model.path
        self.file_of = _files(model.path)
        self._open: dict[Path, Any] = {}

    def stored_name(self, name: str) -> str | None:
        """Returns a tensor's name in the files; None if they lack it."""
        return next((stored for stored in (name, name.removeprefix(BASE)) if stored in self.file_of), None)

    def shape(self, stored: str) -> tuple[int, ...]:
        return tuple(self._slice(stored).get_shape())

    def read(self, stored: str, region: Region) -> Tensor:
        """Reads a copy of the region, and no more of the tensor."""
        tensor: Tensor = self._slice(stored)[tuple(slice(start, stop) for start, stop in region)]
        return tensor

    def _slice(self, stored: str) -> Any:
        file = self.file_of[stored]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(stored)


def _files(path: str) -> dict[str, Path]:
    """Returns the file of every tensor.  A single file with all tensors takes precedence over an index, as in transformers."""
    single = cached_file(path, SINGLE, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), Path(single))
    index = cached_file(path, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise ConfigError(
            f"{path!r} has no safetensors weights (neither {SINGLE} nor {INDEX}), which strategy=megatron reads; "
            "save the model again with save_pretrained"
        )
    files, _ = get_checkpoint_shard_files(path, index)
    by_name = {Path(file).name: Path(file) for file in files}
    weight_map: Mapping[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    return {name: by_name[file] for name, file in weight_map.items()}


def param_parts(built: BuiltMegatron) -> Iterator[ParamParts]:
    """Yields an entry for each parameter of this rank, in the model's order."""
    for number, chunk in enumerate(built.chunks):
        for key, param in chunk.named_parameters():
            yield ParamParts(key=f"{number}.{key}", param=param, parts=_PartsOfChunk(built, number).parts(key, param))


@dataclass(slots=True, kw_only=True)
class ParamParts:
    """A parameter of this rank and its parts; elements outside all parts are padding.  key: a name that is unique on this
    rank."""

    key: str
    param: nn.Parameter
    parts: list[TensorPart]


@dataclass(slots=True, kw_only=True, frozen=True)
class TensorPart:
    """A box of a parameter that is a box of a named tensor, of the same sizes.

    local: the box in the parameter.
    region: the box in the tensor `name`, whose full size is `shape`.
    """

    local: Region
    name: str
    shape: tuple[int, ...]
    region: Region


@dataclass(slots=True, kw_only=True, frozen=True)
class _Share:
    """One rank's place among the ranks that cut a tensor."""

    rank: int
    size: int


class _PartsOfChunk:
    """Finds the parts of the parameters of one piece of the model."""

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
            case [_, _, "adapters", _]:
                return _adapter(self.chunk.decoder.get_submodule(key.removeprefix("decoder.").rpartition(".")[0]), key, param)
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
        """Returns the rank's rows of the padded vocabulary; the last rank's surplus rows, or all of them, are padding."""
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
        """Returns the rank's rows of the gate, followed by its rows of the up projection."""
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
        """Returns the rows of the rank's query groups, one after the other: queries, key, value."""
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


def _adapter(part: nn.Module, key: str, param: nn.Parameter) -> list[TensorPart]:
    """Returns the one part of A or B of a layer's adapter, under its name in a checkpoint."""
    assert isinstance(part, LowRank)
    side, (rows, columns) = key.rpartition(".")[2], part.shape
    name = f"{part.weight_name.removesuffix('.weight')}.{side}.{ADAPTER}.weight"
    first = (0, part.first_column) if side == "lora_A" else (part.first_row, 0)
    shape = (param.shape[0], columns) if side == "lora_A" else (rows, param.shape[1])
    region = tuple((start, start + size) for start, size in zip(first, param.shape, strict=True))
    return [TensorPart(local=whole(param.shape), name=name, shape=shape, region=region)]


def _all(name: str, param: nn.Parameter) -> list[TensorPart]:
    shape = tuple(param.shape)
    return [TensorPart(local=whole(shape), name=name, shape=shape, region=whole(shape))]
