"""A mixture of experts: its weights under checkpoint names, and the choices of its routers, recorded or replaced.

transformers stores the experts of a layer in two tensors, `mlp.experts.gate_up_proj` (experts, 2 x intermediate, hidden) and
`mlp.experts.down_proj` (experts, hidden, intermediate); checkpoints of the Qwen families, vLLM and Megatron-core use one
weight for each expert and projection.  The mapping is by name and holds for models whose checkpoints name experts as Qwen's
do.

A router of transformers returns (logits, weights, choices): of T tokens (T, experts), (T, top_k) and (T, top_k).  The choices of
a token over all its routers, one router's after the other's, are one line of routers * top_k numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhub.errors import EngineError
from rlhub.models.shape import ROUTED
from rlhub.protocol.weights.pieces import Piece, Region, intersection, relative, take, whole_piece

GATE_UP = ".mlp.experts.gate_up_proj"
DOWN = ".mlp.experts.down_proj"
OWN = -1
"""Stands for a choice that is not given: the router's own is taken."""
RouterOutput = tuple[Tensor, Tensor, Tensor]


def is_fused(name: str, shape: tuple[int, ...]) -> bool:
    """Returns whether this is a tensor of all experts of a layer."""
    return len(shape) == 3 and name.endswith((GATE_UP, DOWN))


def unfused(piece: Piece) -> Iterator[Piece]:
    """Yields the piece under its checkpoint names: the piece itself, or a view for each expert and projection of which it has
    a part."""
    if not is_fused(piece.name, piece.shape):
        yield piece
        return
    _, rows, columns = piece.shape
    first, last = piece.region[0]
    for expert in range(first, last):
        for name, (start, stop) in _projections(piece.name, expert, rows):
            box: Region = ((expert, expert + 1), (start, stop), (0, columns))
            common = intersection(box, piece.region)
            if common is not None:
                view = take(piece.tensor, relative(common, piece.region))[0]
                region = relative(common, box)[1:]
                yield Piece(name=name, tensor=view, shape=(stop - start, columns), region=region)


def _projections(name: str, expert: int, rows: int) -> list[tuple[str, tuple[int, int]]]:
    """Returns (checkpoint name, rows of the expert's matrix) for each projection."""
    if name.endswith(DOWN):
        return [(f"{name.removesuffix('down_proj')}{expert}.down_proj.weight", (0, rows))]
    prefix, half = f"{name.removesuffix('gate_up_proj')}{expert}", rows // 2
    return [(f"{prefix}.gate_proj.weight", (0, half)), (f"{prefix}.up_proj.weight", (half, rows))]


def unfused_tensors(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields whole tensors as `unfused` yields pieces."""
    for name, tensor in named:
        for piece in unfused(whole_piece(name, tensor)):
            yield piece.name, piece.tensor


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


def replay_in(model: PreTrainedModel) -> RouterReplay | None:
    """Returns what gives the routers of a model of transformers their experts, None for a model other than ROUTED.

    The weights of these models' experts are the softmax over all experts at the chosen ones, divided by their sum where the
    router's `norm_topk_prob` says so.  Hooks that are registered later see the experts given.
    """
    routers = routers_of(model)
    if not routers or model.config.get_text_config().model_type not in ROUTED:
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
