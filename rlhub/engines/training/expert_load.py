"""How evenly a mixture of experts is used: the tokens that each expert of each layer gets while gradients are computed.

A collapsed router sends most tokens to few experts, which costs capacity and, with expert parallelism, time.  Tokens that fill a
pass up for sequence parallelism count, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhub.models.experts import routers_of
from rlhub.models.shape import NUM_EXPERTS


class ExpertLoad:
    """Counts on the device, without waiting for it, what routers choose.

    routers: those of this rank, by the numbers of their layers; none on a pipeline stage of dense layers.
    sizes: (layers, experts) of the whole model.
    chosen: returns the tokens of each expert, (experts,), from a router's output.
    """

    def __init__(
        self,
        routers: Mapping[int, nn.Module],
        sizes: tuple[int, int],
        chosen: Callable[[Any, int], Tensor],
        device: torch.device,
    ) -> None:
        self._counts = torch.zeros(sizes, device=device, dtype=torch.float64)
        for layer, router in routers.items():
            router.register_forward_hook(partial(self._count, chosen, layer))

    def _count(self, chosen: Callable[[Any, int], Tensor], layer: int, router: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._counts[layer] += chosen(output, self._counts.shape[1])

    def take(self) -> Tensor:
        """Returns the tokens since the last call; (layers, experts), a layer that is not here with zeros."""
        counts = self._counts.clone()
        self._counts.zero_()
        return counts

    def metrics(self, reduce: Callable[..., Tensor]) -> dict[str, float]:
        """Returns means over the layers with experts of what these got since the last call, equal on every rank; every rank calls
        it.

        reduce: TrainEngine.reduce.

        actor/expert_load_max: the tokens of the busiest expert over the mean, 1 where all have as many.
        actor/expert_load_entropy: the entropy of the experts' shares over its maximum, 1 where all have as many.
        actor/experts_idle: the share of the experts that got no token.
        """
        counts = reduce(self.take().cpu(), every_rank=True)
        counts = counts[counts.sum(1) > 0]
        if not len(counts):
            return {}
        shares, num_experts = counts / counts.sum(1, keepdim=True), counts.shape[1]
        return {
            "actor/expert_load_max": float(shares.amax(1).mean()) * num_experts,
            "actor/expert_load_entropy": float(torch.special.entr(shares).sum(1).mean()) / math.log(num_experts),
            "actor/experts_idle": float((counts == 0).double().mean()),
        }


def load_of(model: PreTrainedModel, device: torch.device) -> ExpertLoad | None:
    """Returns the count of a model of transformers, None if it has no experts."""
    values = model.config.get_text_config().to_dict()
    routers = routers_of(model)
    num_experts = next((int(values[name]) for name in NUM_EXPERTS if values.get(name)), 0)
    if not routers or not num_experts:
        return None
    return ExpertLoad(dict(enumerate(routers)), (len(routers), num_experts), of_indices, device)


def of_indices(output: tuple[Tensor, ...], num_experts: int) -> Tensor:
    """Counts what a router of transformers has chosen; the last of its outputs is (tokens, top_k)."""
    chosen = output[-1].flatten()
    ones = torch.ones_like(chosen, dtype=torch.float64)
    return ones.new_zeros(num_experts).scatter_add_(0, chosen, ones)


def of_map(output: tuple[Tensor, Tensor], num_experts: int) -> Tensor:
    """Counts what a router of Megatron-core has chosen; the second of its outputs is a mask (tokens, experts)."""
    return output[1].sum(0).double()
