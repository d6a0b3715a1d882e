"""Low-rank adapters (Hu et al., arXiv 2106.09685) by peft, injected into the model's linear layers.

The model stays an object of its Hugging Face class; an adapted layer q_proj becomes a peft layer that has the frozen weight as
`q_proj.base_layer.weight` and trains `q_proj.lora_A.default.weight` (rank, in) and `q_proj.lora_B.default.weight` (out, rank).
Everything outside this file sees the frozen weight under its old name.  peft is imported only for a model with adapters: it
takes as long to load as the rest of rlhub.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.hf import SCALAR_HEAD, ModelKind
from rlhub.models.shape import POLICIES

if TYPE_CHECKING:
    from peft import LoraConfig

SIDES: tuple[Literal["A", "B"], ...] = ("A", "B")
ADAPTER = "default"  # peft's own name for the only adapter
PEFT_MODEL = "base_model.model."  # where peft.PeftModel keeps the model it wraps; its files name tensors from there
VARIANTS = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "lora_bias", "layer_replication")
"""Entries of peft's adapter_config.json that change what the adapters compute."""
TASKS: dict[ModelKind, str] = {
    "policy": "CAUSAL_LM",
    "value": "SEQ_CLS",
    "reward": "SEQ_CLS",
    "vla": "CAUSAL_LM",
}  # peft's TaskType


@dataclass(slots=True, kw_only=True, frozen=True)
class LoraNames:
    """The names of one adapted layer.

    weight: the Hugging Face name of the frozen weight.
    lora_a, lora_b: the names of its two adapters in the model.
    scaling: the factor alpha / rank of (B A) in the merged weight.
    """

    weight: str
    lora_a: str
    lora_b: str
    scaling: float


def add_lora(model: nn.Module, config: ModelConfig, *, head: nn.Module | None, seed: int) -> None:
    """Freezes the model and adds adapters to its linear layers, with A random and B zero, so that its outputs stay the same.

    Raises ConfigError if target_modules names no linear layer.

    head: the output layer, which is never adapted because its matrix is read directly.
    seed: alone determines A; the process's random state is neither read nor changed.
    """
    from peft import inject_adapter_in_model

    lora = _peft_config(config, _targets(model, config, head))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of the CPU, where models are built
        inject_adapter_in_model(lora, model, ADAPTER)


def _peft_config(config: ModelConfig, targets: list[str], **others: Any) -> LoraConfig:
    from peft import LoraConfig

    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # annotated int, used as a number
        target_modules=targets,
        lora_dropout=0.0,  # dropout would make the policy being stepped differ from the one that sampled
        bias="none",
        **others,
    )


def _targets(model: nn.Module, config: ModelConfig, head: nn.Module | None) -> list[str]:
    """Returns the full names of the layers to adapt.  They are resolved here, because peft accepts a list in which only some
    names match."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    if config.target_modules == "all-linear":
        return linears
    wanted = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules
    unknown = [target for target in wanted if not any(is_adapted(name, [target]) for name in linears)]
    if unknown or not wanted:
        known = sorted({name.rpartition(".")[2] for name in linears})
        raise ConfigError(f"model.target_modules: no linear layer is named {unknown}; the model has {', '.join(known)}")
    return [name for name in linears if is_adapted(name, wanted)]


def scaling_of(config: ModelConfig) -> float:
    """Returns the factor alpha / rank of the adapters' output."""
    return config.lora_alpha / config.lora_rank


def is_adapted(name: str, targets: str | Sequence[str]) -> bool:
    """Returns whether target_modules selects the linear layer of this name."""
    if targets == "all-linear":
        return True
    wanted = [targets] if isinstance(targets, str) else targets
    return any(name == target or name.endswith(f".{target}") for target in wanted)


def saved_name(layer: str, side: Literal["A", "B"]) -> str:
    """Returns the name of a layer's A (rank, in) or B (out, rank) in peft's adapter_model.safetensors."""
    return f"{PEFT_MODEL}{layer}.lora_{side}.weight"


def load_adapter(model: nn.Module, config: ModelConfig, kind: ModelKind) -> None:
    """Fills the adapters, and a scalar head, from the files of model.lora_adapter_path."""
    names, parameters = saved_names(model, kind), dict(model.named_parameters())
    shapes = {saved: tuple(parameters[name].shape) for name, saved in names.items()}
    tensors = read_adapter(config, shapes)
    with torch.no_grad():
        for name, saved in names.items():
            parameters[name].copy_(tensors[saved])


def read_adapter(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Reads the tensors of model.lora_adapter_path by their names in the file.

    shapes: those that the model has.  Raises ConfigError for files that cannot be read, or whose adapter is not of the settings'
    rank, scale and layers, or of a kind other than plain LoRA.
    """
    assert config.lora_adapter_path is not None
    folder = Path(config.lora_adapter_path).expanduser()
    try:
        settings: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"model.lora_adapter_path={folder} is no adapter in peft's format: {error}") from error
    problems = [
        f"model.{key}={here} must be {settings.get(name)}, as the adapter was trained"
        for key, name, here in (("lora_rank", "r", config.lora_rank), ("lora_alpha", "lora_alpha", config.lora_alpha))
        if settings.get(name) != here
    ]
    problems += [f"it has {name}={settings[name]}, and only plain LoRA is known" for name in VARIANTS if settings.get(name)]
    if differing := sorted(shapes.keys() ^ tensors.keys()):
        problems.append(f"model.target_modules selects other layers than the adapter has: {differing[0]} is in one alone")
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, not {shape}; it belongs to another model"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ][:1]
    if problems:
        raise ConfigError([f"model.lora_adapter_path={folder}: {problem}" for problem in problems])
    return tensors


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (name, peft's LoraLayer) of all adapted layers, in the model's order."""
    lora = sys.modules.get("peft.tuners.lora")
    if lora is None:
        return iter(())  # nobody in this process has adapted anything
    return ((name, module) for name, module in model.named_modules() if isinstance(module, lora.LoraLayer))


def set_adapters(model: nn.Module, enabled: bool) -> None:
    """Switches all adapters on or off in the computation, without changing which parameters train.

    peft's own switch also sets requires_grad on the parameters that a layer has at the moment.  Between two passes of a
    sharded model these are the gathered ones, and the shards would never be trained again.
    """
    for _, module in lora_layers(model):
        trained = [(param, param.requires_grad) for param in module.parameters()]
        module.enable_adapters(enabled)
        for param, flag in trained:
            param.requires_grad_(flag)


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the entries of model.named_parameters(), with the frozen weights of adapted layers under their Hugging Face
    names."""
    owners = {f"{name}.base_layer": name for name, _ in lora_layers(model)}
    for name, param in model.named_parameters():
        owner, _, own = name.rpartition(".")
        yield (f"{owners[owner]}.{own}" if owner in owners else name), param


def lora_names(model: nn.Module) -> list[LoraNames]:
    """Returns the names of each adapted layer, for merging."""
    return [
        LoraNames(
            weight=f"{name}.weight",
            lora_a=f"{name}.lora_A.{ADAPTER}.weight",
            lora_b=f"{name}.lora_B.{ADAPTER}.weight",
            scaling=layer.scaling[ADAPTER],
        )
        for name, layer in lora_layers(model)
    ]


def saved_names(model: nn.Module, kind: ModelKind) -> dict[str, str]:
    """Maps the name of each trained weight (adapters, scalar head) in the model to its name in peft's
    adapter_model.safetensors."""
    saved: dict[str, str] = {}
    for name, _ in lora_layers(model):
        saved |= {f"{name}.lora_{side}.{ADAPTER}.weight": saved_name(name, side) for side in SIDES}
    return saved | ({f"{SCALAR_HEAD}.weight": f"{PEFT_MODEL}{SCALAR_HEAD}.weight"} if kind not in POLICIES else {})


def saved_config(layers: Iterable[str], config: ModelConfig, kind: ModelKind) -> dict[str, Any]:
    """Returns the content of peft's adapter_config.json, JSON-able.  layers: the names of the adapted layers."""
    lora = _peft_config(
        config,
        list(layers),
        task_type=TASKS[kind],
        base_model_name_or_path=config.path,
        modules_to_save=[SCALAR_HEAD] if kind not in POLICIES else None,
        inference_mode=True,
    )
    content: dict[str, Any] = lora.to_dict()  # type: ignore[no-untyped-call]
    return {key: sorted(value) if isinstance(value, set) else value for key, value in content.items()}
