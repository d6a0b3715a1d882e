"""Reading a Hugging Face checkpoint straight into Megatron parameters: each rank reads, from memory-mapped safetensors, only
the boxes it holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from rlhub.config.sections.model import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.hf import SCALAR_HEAD
from rlhub.models.megatron.names import ParamParts, parts
from rlhub.models.required_weights import refuse_nonfinite
from rlhub.models.weight_files import INDEX, SINGLE
from rlhub.protocol.weights.regions import Region, take

if TYPE_CHECKING:
    from rlhub.models.megatron.build import BuiltMegatron

BASE = "model."
"""What a checkpoint of the transformer without a head leaves out of its names."""
LAYER = re.compile(r"(model\.layers\.\d+\.)(?!mlp\.experts\.).*(?<!inv_freq)")
"""Tensors of a layer that every rank with the layer has a part of; a rank has only some of the experts."""


class Checkpoint:
    """The tensors of a model folder or hub model, by name.  Files stay open until it is garbage."""

    def __init__(self, model: ModelConfig) -> None:
        assert model.path is not None, "checked when the configuration is loaded"
        self.path = model.path
        self.file_of = _files(model.path)
        self._open: dict[Path, Any] = {}

    def stored_name(self, name: str) -> str | None:
        """The name a tensor has in the files; None: it is not there."""
        return next((stored for stored in (name, name.removeprefix(BASE)) if stored in self.file_of), None)

    def shape(self, stored: str) -> tuple[int, ...]:
        return tuple(self._slice(stored).get_shape())

    def read(self, stored: str, region: Region) -> Tensor:
        """A copy of the region; no more of the tensor is read."""
        tensor: Tensor = self._slice(stored)[tuple(slice(start, stop) for start, stop in region)]
        return tensor

    def _slice(self, stored: str) -> Any:
        file = self.file_of[stored]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_slice(stored)


def _files(path: str) -> dict[str, Path]:
    """The file of every tensor; one file with all goes before an index, as for transformers."""
    single = cached_file(path, SINGLE, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), Path(single))
    index = cached_file(path, INDEX, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise ConfigError(
            f"{path!r} has no safetensors weights (neither {SINGLE} nor {INDEX}), which strategy=megatron reads; "
            "save the model anew with save_pretrained"
        )
    files, _ = get_checkpoint_shard_files(path, index)
    by_name = {Path(file).name: Path(file) for file in files}
    weight_map: Mapping[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    return {name: by_name[file] for name, file in weight_map.items()}


@torch.no_grad()
def load_weights(built: BuiltMegatron, model: ModelConfig, seed: int) -> None:
    """Fill this rank's parameters from the checkpoint; padding becomes zero.

    seed: of a scalar head that the checkpoint lacks, which all ranks and backends then draw alike.  Raises ConfigError
    naming tensors that are missing, of another shape, not finite, or that the checkpoint has and the model does not.
    """
    checkpoint = Checkpoint(model)
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
    held = ((part.name, take(entry.param, part.local)) for entry in entries for part in entry.parts)
    refuse_nonfinite(checkpoint.path, held)


def _drawn_head(built: BuiltMegatron, seed: int) -> Tensor:
    """A new scalar head as transformers draws it for `rlhub.models.hf.build_model`; the process's generator stays as it is."""
    generator = torch.Generator().manual_seed(seed)
    head = nn.Parameter(torch.empty(1, built.hf_config.hidden_size), requires_grad=False)
    return head.normal_(0.0, built.hf_config.initializer_range, generator=generator)


def _check(checkpoint: Checkpoint, entries: Iterable[ParamParts]) -> None:
    """Compare names and shapes with what this rank holds."""
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
    """The first few."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
