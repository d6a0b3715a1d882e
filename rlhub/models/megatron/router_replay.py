"""Recorded experts in place of those that Megatron-core's routers would choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
from megatron.core.transformer.moe import router_replay
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from rlhub.models.routers import RouterReplay


def replay_in(chunks: Sequence[nn.Module], config: TransformerConfig) -> None:
    """Makes the routers of this rank's pieces of a model take the experts that its forward pass is given.

    A layer takes the experts of a pass from the plan that it is called with, again where it is computed again in a backward pass,
    which in a pipeline comes after the forward passes of other micro-batches.
    """
    if not config.num_moe_experts:
        return
    replay = RouterReplay(sum(config.moe_layer_freq))

    def load(layer: nn.Module, args: Any, options: dict[str, Any]) -> None:
        replay.load(options["packed_seq_params"].experts)

    for layer in [module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerLayer)]:
        for router in [module for module in layer.modules() if isinstance(module, TopKRouter)]:
            router.router_replay = ReplayedTopK(replay, sum(config.moe_layer_freq[: layer.layer_number - 1]))
            layer.register_forward_pre_hook(load, with_kwargs=True)


class ReplayedTopK(router_replay.RouterReplay):  # type: ignore[misc]
    """Stands in the place where Megatron's router asks for a replay instead of its own top-k.

    Megatron's own class keeps every router of the process in one list, and takes micro-batches in the order of their forward
    passes alone.
    """

    def __init__(self, replay: RouterReplay, number: int) -> None:
        self._replay, self._number = replay, number

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Returns (scores, experts), (tokens, topk) each."""
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        chosen = self._replay.chosen(self._number, own)
        return (values, own) if chosen is None else (scores.gather(1, chosen), chosen)
