"""Low-rank adapters (Hu et al., arXiv 2106.09685) on linear layers.

The adapted layer keeps its weight's name, so checkpoints, weight streams and sharding see the same model as without adapters
plus two small matrices a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rlhub.config.model import ModelConfig
from rlhub.errors import ConfigError

LORA_A, LORA_B = "lora_a", "lora_b"


class LoRALinear(nn.Linear):
    """y = x W^T + b + (alpha / rank) x A^T B^T, W and b frozen; A (rank, in) random, B (out, rank) zero at the start."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.scaling = alpha / rank
        self.enabled = True
        bound = base.in_features**-0.5  # the uniform distribution nn.Linear draws its own weights from
        start = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(start.to(base.weight.dtype))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, dtype=base.weight.dtype))

    def forward(self, input: Tensor) -> Tensor:
        out = linear(input, self.weight, self.bias)
        if not self.enabled:
            return out
        return out + linear(linear(input, self.lora_a), self.lora_b) * self.scaling


def add_lora(model: nn.Module, config: ModelConfig, *, head: nn.Module | None, seed: int) -> list[str]:
    """Freeze the model and put adapters on its linear layers; returns the names of the adapted layers.

    head: output layer, never adapted by "all-linear".  A value model's new head stays trainable: it has nothing to adapt.
    Raises ConfigError when target_modules names no linear layer.
    """
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    wanted = None if config.target_modules == "all-linear" else _names(config.target_modules)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head}
    chosen = [name for name in linears if wanted is None or name.rpartition(".")[2] in wanted or name in wanted]
    unknown = (wanted or set()) - {name.rpartition(".")[2] for name in chosen} - set(chosen)
    if not chosen or unknown:
        known = sorted({name.rpartition(".")[2] for name in linears})
        raise ConfigError(f"model.target_modules: no linear layer is named {sorted(unknown)}; the model has {', '.join(known)}")
    for name in chosen:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, LoRALinear(linears[name], config.lora_rank, config.lora_alpha, generator))
    return chosen


def _names(target_modules: str | Sequence[str]) -> set[str]:
    return {target_modules} if isinstance(target_modules, str) else set(target_modules)


def set_adapters(model: nn.Module, enabled: bool) -> None:
    """Switch all adapters on or off."""
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.enabled = enabled
