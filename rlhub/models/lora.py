"""Low-rank adapters (Hu et al., arXiv 2106.09685) by peft, injected into the model's linear layers.

The model stays an object of its Hugging Face class; an adapted layer q_proj becomes a peft layer that has the frozen weight as
`q_proj.base_layer.weight` and trains `q_proj.lora_A.default.weight` (rank, in) and `q_proj.lora_B.default.weight` (out, rank).
Everything outside this file sees the frozen weight under its old name.  peft is imported only for a model with adapters: it
takes as long to load as the rest of rlhub.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.hf import SCALAR_HEAD, ModelKind
from rlhub.models.shape import POLICIES

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"  # peft's own name for the only adapter
PEFT_MODEL = "base_model.model."  # where peft.PeftModel keeps the model it wraps; its files name tensors from there
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
    unknown = [target for target in wanted if not any(_is_called(name, target) for name in linears)]
    if unknown or not wanted:
        known = sorted({name.rpartition(".")[2] for name in linears})
        raise ConfigError(f"model.target_modules: no linear layer is named {unknown}; the model has {', '.join(known)}")
    return [name for name in linears if any(_is_called(name, target) for target in wanted)]


def _is_called(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


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
    names = [name for layer in lora_names(model) for name in (layer.lora_a, layer.lora_b)]
    saved = {name: PEFT_MODEL + re.sub(rf"\.{ADAPTER}\.weight$", ".weight", name) for name in names}
    return saved | ({f"{SCALAR_HEAD}.weight": f"{PEFT_MODEL}{SCALAR_HEAD}.weight"} if kind not in POLICIES else {})


def saved_config(model: nn.Module, config: ModelConfig, kind: ModelKind) -> dict[str, Any]:
    """Returns the content of peft's adapter_config.json, JSON-able."""
    lora = _peft_config(
        config,
        [name for name, _ in lora_layers(model)],
        task_type=TASKS[kind],
        base_model_name_or_path=config.path,
        modules_to_save=[SCALAR_HEAD] if kind not in POLICIES else None,
        inference_mode=True,
    )
    content: dict[str, Any] = lora.to_dict()  # type: ignore[no-untyped-call]
    return {key: sorted(value) if isinstance(value, set) else value for key, value in content.items()}
