"""The routers of a transformers mixture of experts: what they choose is recorded, or replaced by recorded choices.

A router returns (logits, weights, choices): of T tokens (T, experts), (T, top_k) and (T, top_k).  The choices of a token over all
its routers, one router's after the other's, are one line of routers * top_k numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rlhub.errors import EngineError

OWN = -1
"""Stands for a choice that is not given: the router's own is taken."""
RouterOutput = tuple[Tensor, Tensor, Tensor]


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the routers of a model of transformers, in the order of its layers."""
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


def choice_dtype(num_experts: int) -> torch.dtype:
    """Returns the narrowest dtype for the numbers of experts."""
    return torch.uint8 if num_experts <= torch.iinfo(torch.uint8).max + 1 else torch.int16


@contextmanager
def recording(model: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Yields a function that returns the choices of the last forward pass inside the context, (tokens, routers * top_k) in
    `choice_dtype`."""
    routers = routers_of(model)
    chosen: list[Tensor] = [torch.empty(0)] * len(routers)

    def keep(number: int, router: nn.Module, inputs: Any, output: RouterOutput) -> None:
        logits, _, choices = output
        chosen[number] = choices.to(choice_dtype(logits.shape[-1]))

    handles = [router.register_forward_hook(partial(keep, number)) for number, router in enumerate(routers)]
    try:
        yield lambda: torch.cat(chosen, dim=-1)
    finally:
        for handle in handles:
            handle.remove()


class RouterReplay:
    """Gives routers the experts of the tokens of a pass, in place of those that they would choose (rollout routing replay, Ma et
    al. 2025, arXiv 2510.11370).

    The weights of the experts stay the model's own function of its router's logits, here at the given experts, so gradients reach
    the router.  Choices are in place until others are: a backward pass that computes activations again sees those of its forward
    pass, if it comes before the next one.
    """

    def __init__(self, num_routers: int) -> None:
        self._num_routers = num_routers
        self._choices: Tensor | None = None

    def load(self, choices: Tensor | None) -> None:
        """Takes the choices of the next pass, (tokens, routers * top_k) in the order in which routers see the tokens, OWN where
        there is none; None for a pass in which routers choose."""
        self._choices = choices

    def chosen(self, number: int, own: Tensor) -> Tensor | None:
        """Returns the experts (tokens, top_k) of router `number`, None in a pass in which routers choose.  own: the router's own
        choice."""
        if self._choices is None:
            return None
        top_k = own.shape[1]
        if self._choices.shape != (len(own), self._num_routers * top_k):
            raise EngineError(
                f"recorded experts are {tuple(self._choices.shape)}, and a pass of the trained model has {len(own)} tokens with "
                f"{self._num_routers} x {top_k} experts: the model that generated is another one"
            )
        given = self._choices[:, number * top_k : (number + 1) * top_k].long()
        return torch.where(given == OWN, own, given)


def replay_in(model: nn.Module) -> RouterReplay | None:
    """Returns what gives the routers of a model of transformers their experts, None for a model without routers.

    It holds for routers whose weights are the softmax over all experts at the chosen ones, divided by their sum where the
    router's `norm_topk_prob` says so (`routing_problems` knows which models have those).  Hooks that are registered later see
    the experts given.
    """
    routers = routers_of(model)
    if not routers:
        return None
    replay = RouterReplay(len(routers))

    def replace(number: int, router: Any, inputs: Any, output: RouterOutput) -> RouterOutput | None:
        logits, weights, choices = output
        chosen = replay.chosen(number, choices)
        if chosen is None:
            return None
        gathered = logits.softmax(-1, dtype=torch.float).gather(1, chosen)
        if router.norm_topk_prob:
            gathered = gathered / gathered.sum(-1, keepdim=True)
        return logits, gathered.to(weights.dtype), chosen

    for number, router in enumerate(routers):
        router.register_forward_hook(partial(replace, number))
    return replay
