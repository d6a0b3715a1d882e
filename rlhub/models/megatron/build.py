"""Building Megatron-core models from Hugging Face checkpoints: policies, and value and reward models with a scalar head.

Weights are read straight into Megatron parameters: each rank reads, from memory-mapped safetensors, only its own boxes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
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
from rlhub.models.megatron.checks import megatron_problems, num_virtual_stages
from rlhub.models.megatron.model import BuiltMegatron, MegatronLM
from rlhub.models.megatron.names import ParamParts, parts
from rlhub.models.megatron.transformer_config import make_transformer_config
from rlhub.models.required_weights import refuse_nonfinite
from rlhub.models.shape import reward_problem
from rlhub.models.weight_files import INDEX, SINGLE
from rlhub.protocol.weights.regions import Region, take

BASE = "model."
"""The beginning of names that a checkpoint of the transformer without a head lacks."""
LAYER = re.compile(r"(model\.layers\.\d+\.)(?!mlp\.experts\.).*(?<!inv_freq)")
"""Tensors of a layer that every rank with the layer has a part of; a rank has only some of the experts."""


@dataclass(slots=True, kw_only=True)
class MegatronPlan:
    """The model to build.  dtype: of the weights and the computation.  trainable: whether weights take gradients.  seed: of
    weights the checkpoint lacks.  device: of the weights."""

    model: ModelConfig
    kind: ModelKind
    megatron: MegatronConfig
    dtype: torch.dtype
    trainable: bool
    seed: int
    device: torch.device


def build_megatron(plan: MegatronPlan, *, load: bool = True) -> BuiltMegatron:
    """Builds this rank's part of the model with the checkpoint's weights.  Every rank calls it, when model parallelism is set up.

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
    return built


def load_megatron_config(model: ModelConfig, kind: ModelKind, megatron: MegatronConfig) -> PreTrainedConfig:
    """Loads the Hugging Face configuration; raises ConfigError with all problems that prevent building the model."""
    config = load_config(model)
    if kind == "reward" and (problem := reward_problem(str(model.path), config.architectures or [], config.num_labels)):
        raise ConfigError(problem)
    world = torch.distributed.get_world_size()
    if problems := megatron_problems(config.to_dict(), megatron, world, lora_rank=model.lora_rank):
        raise ConfigError(problems)
    return config


def _places(stages: int | None) -> list[dict[str, Any]]:
    """Returns the place of each of this rank's pieces in the model, in order."""
    rank, last = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_world_size() - 1
    if stages is None:
        return [{"first": rank == 0, "last": rank == last, "stage": None}]
    return [
        {"first": rank == 0 and stage == 0, "last": rank == last and stage == stages - 1, "stage": stage}
        for stage in range(stages)
    ]


def _seed_generators(plan: MegatronPlan) -> None:
    """Creates Megatron's generators for dropout, which must exist though nothing is dropped; the process's own stay unchanged."""
    devices = [plan.device] if plan.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        model_parallel_cuda_manual_seed(plan.seed)


@torch.no_grad()
def load_weights(built: BuiltMegatron, model: ModelConfig, seed: int) -> None:
    """Fills this rank's parameters from the checkpoint; padding becomes zero.

    seed: of a scalar head that the checkpoint lacks, which all ranks and backends then draw alike.  Raises ConfigError
    naming tensors that are missing, of another shape, not finite, or that the checkpoint has and the model does not.
    """
    checkpoint = HFCheckpoint(model)
    entries = list(parts(built))
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
    """Draws a new scalar head as transformers does for `rlhub.models.hf.build_model`; the process's generator stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    head = nn.Parameter(torch.empty(1, built.hf_config.hidden_size), requires_grad=False)
    return head.normal_(0.0, built.hf_config.initializer_range, generator=generator)


def _check(checkpoint: HFCheckpoint, entries: Iterable[ParamParts]) -> None:
    """Compares names and shapes with this rank's parameters."""
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
    """Lists the first few names."""
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
    """Returns the file of every tensor; one file with all goes before an index, as for transformers."""
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
