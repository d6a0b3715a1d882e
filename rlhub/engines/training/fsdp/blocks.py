"""The repeated blocks of a model, before they are sharded: what a backward pass computes again, and compilation.

Recomputation lies inside the compiled block, and sharding's hooks outside, as in torchtitan: so a block is one graph, whose
compiler knows what is kept, and weights are gathered before it starts.  All blocks of a kind share what is compiled, at a second
size once more for any number of tokens.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from rlhub.config.sections.training import Recompute
from rlhub.errors import ConfigError
from rlhub.models.hf import transformer_layers

logger = logging.getLogger(__name__)

BACKEND = "inductor"
MIN_GRAPHS = 64
"""Graphs that a block may have: for one size and any, with and without gradient, with each window, and on CPU for each number of
groups of rows.  torch's own limit is 8, beyond which blocks are no longer compiled."""
KEPT = (
    *(f"aten.{name}" for name in ("mm", "addmm", "bmm", "_grouped_mm")),
    *(f"aten._scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")),
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "torch_attn._varlen_attn",
)
"""The products of matrices and the attention kernels.  With selective recomputation their results stay in memory, and norms,
activations and rotations, whose results are as large but cost little, are computed again (Korthikanti et al., arXiv
2205.05198)."""


def prepare_blocks(model: PreTrainedModel, recompute: Recompute, *, compiled: bool) -> None:
    """Changes the forward of each block in place; call before the model is sharded.

    recompute: "full" computes all of a block again in the backward pass, "selective" all but KEPT.
    """
    if recompute == "full" and not compiled:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if compiled:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MIN_GRAPHS)
    for block in transformer_layers(model):
        if recompute == "selective":
            block.forward = MethodType(_selective_forward, block)
        elif recompute == "full" and compiled:
            block.forward = MethodType(_recomputed_forward, block)
        if compiled:
            block.forward = torch.compile(block.forward, backend=BACKEND)


def _recomputed_forward(block: nn.Module, hidden: Tensor, *args: Any, **options: Any) -> Any:
    """Computes a block of which the backward pass has the input alone.

    It lies inside the compiled block: outside, what computes again may be another graph, for any number of tokens, that keeps
    other tensors.
    """

    def forward(hidden: Tensor) -> Any:
        return type(block).forward(block, hidden, *args, **options)

    return checkpoint(forward, hidden, use_reentrant=False) if torch.is_grad_enabled() else forward(hidden)


def _selective_forward(block: nn.Module, hidden: Tensor, *args: Any, **options: Any) -> Any:
    """Computes a block whose results of KEPT stay in memory for the backward pass."""

    def forward(hidden: Tensor) -> Any:
        return type(block).forward(block, hidden, *args, **options)

    if not torch.is_grad_enabled():
        return forward(hidden)
    return checkpoint(forward, hidden, use_reentrant=False, context_fn=_keeping)


def _keeping() -> Any:
    return create_selective_checkpoint_contexts(_kept_operators())  # type: ignore[no-untyped-call]


@functools.cache
def _kept_operators() -> list[Any]:
    """Returns the operators of KEPT that this torch has."""
    found = []
    for name in KEPT:
        with contextlib.suppress(AttributeError):
            found.append(operator.attrgetter(name)(torch.ops).default)
    return found


def resolve_compile(setting: bool | None, device: torch.device) -> bool:
    """Returns whether blocks are compiled: as set, and by default on CUDA where a compiler works.

    Raises ConfigError where it is set and no compiler works.
    """
    wanted = device.type == "cuda" if setting is None else setting
    problem = compiler_problem(device) if wanted else None
    if problem is None:
        return wanted
    text = f"fsdp_config.use_torch_compile: torch compiles nothing here ({problem})"
    if setting:
        raise ConfigError(f"{text}; install a C compiler and Python's headers, or set it to false")
    logger.warning("%s: models run uncompiled, which is slower; install a C compiler and Python's headers", text)
    return False


def compiler_problem(device: torch.device) -> str | None:
    """Compiles and runs the smallest function; returns the first line of what went wrong, or None."""
    add: Callable[[Tensor], Tensor] = torch.compile(_add_one, backend=BACKEND)
    try:
        add(torch.ones(8, device=device))
    except RuntimeError as error:  # the base of dynamo's and inductor's errors
        return " ".join(str(error).split())[:200]
    return None


def _add_one(tensor: Tensor) -> Tensor:
    return tensor + 1
