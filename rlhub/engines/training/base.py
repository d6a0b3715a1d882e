"""TrainEngine: the interface of every training backend to the workers above it.

One engine has one model (policy, value or reward model) sharded over the ranks of a process group.  Unless a method says
otherwise, EVERY rank calls it, in the same order, and it blocks.  Rows stay on the rank that was given them; quantities
over all of them (denominators of losses, statistics) go through `reduce`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhub.protocol.weights.pieces import Piece

Rows = Mapping[str, Tensor]
"""Equally long columns, first axis = rows.  An engine reads `input_ids` and `attention_mask` (rows, prompt + response) and
`responses` (rows, response) or `response_mask` (rows, response) to know how wide the response is (a reward model reads the
first two alone); position ids are derived from the attention mask."""


@dataclass(slots=True, kw_only=True)
class ForwardOutputs:
    """Outputs of one micro-batch: per token (rows, response), zero where response_mask is 0, or per row (rows,); float32, or
    float64 for a float64 model."""

    log_probs: Tensor | None = None  # log pi(token) after dividing logits by the temperature
    entropy: Tensor | None = None  # of the full distribution after temperature
    sum_pi_squared: Tensor | None = None  # sum of its squared probabilities; carries no gradient
    values: Tensor | None = None
    scores: Tensor | None = None  # (rows,), read at each row's last attended token; 0 for a row without (a filler row)


@dataclass(slots=True, kw_only=True)
class LossOutput:
    """The result of a loss function for one micro-batch.

    loss: scalar, this micro-batch's SHARE of the optimizer step's loss, so that the sum over all micro-batches and ranks
        is the step's loss (denominators are global counts).
    sums: named scalars to be summed over micro-batches and ranks (metrics' numerators or denominators).
    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)


LossFunction = Callable[[ForwardOutputs, Rows], LossOutput]


@dataclass(slots=True, kw_only=True)
class StepReport:
    """The result of `optimizer_step`.  skipped: loss or gradient was not finite, and the weights have not changed."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass(slots=True, kw_only=True)
class Adapter:
    """LoRA adapters as peft stores them.  config: the content of adapter_config.json.  buckets: the tensors of
    adapter_model.safetensors, a stream like that of `named_weights`."""

    config: dict[str, Any]
    buckets: Iterator[list[tuple[str, Tensor]]]


class TrainEngine(ABC):
    """See the module docstring.

    dp_rank, dp_size: which shard of the rows this rank is given; ranks that share a model copy (tensor, pipeline) share it.
    is_collect: True on the one rank of each shard whose outputs stand for it (all of them have the same).
    """

    dp_rank: int
    dp_size: int
    is_collect: bool
    device: torch.device

    @abstractmethod
    def initialize(self) -> None:
        """Builds and shards the model, the optimizer and the schedule.  Call once, after the process group exists."""

    @abstractmethod
    def forward_backward(
        self, rows: Rows, loss_fn: LossFunction, *, outputs: Iterable[str] = ("log_probs",), rows_per_unit: int = 1
    ) -> dict[str, float]:
        """Accumulates the gradient of one optimizer step over `rows`, cut into micro-batches; returns the globally summed
        `loss` and LossOutput.sums.  Ranks may have different numbers of rows, also none.  Gradients start from zero.

        rows_per_unit: so many neighbouring rows always stay together and in order, for a loss that compares them; each rank
        has whole units.  A pass of a rank that has no rows left has one unit of rows that are masked everywhere.
        outputs: which of "log_probs", "entropy", "values", "scores" the loss reads; nothing else is computed.
        """

    @abstractmethod
    def optimizer_step(self) -> StepReport:
        """Clips, steps (or skips when not finite), advances the schedule and zeroes the gradients."""

    @abstractmethod
    def infer(self, rows: Rows, *, outputs: Iterable[str], adapters: bool = True) -> dict[str, Tensor]:
        """Computes the named outputs without gradient: float32 on CPU in ForwardOutputs' shapes, in the order of the rows given.

        adapters=False computes with LoRA adapters off (the reference policy of a LoRA run).
        """

    @abstractmethod
    def reduce(self, values: Tensor, op: str = "sum", *, every_rank: bool = False) -> Tensor:
        """Reduces ("sum", "max" or "min") a small tensor over the data-parallel ranks; returns a new tensor.

        every_rank: over all ranks, for quantities that differ inside a shard too.
        """

    @abstractmethod
    def named_weights(self, *, bucket_bytes: int = 256 << 20) -> Iterator[list[tuple[str, Tensor]]]:
        """Streams the full weights under their Hugging Face names in buckets of about `bucket_bytes` (a larger tensor is a
        bucket of its own); every rank gets the same buckets.  Adapters are merged in.  Tied weights appear once, under
        the input embedding's name.  A bucket's tensors are valid until the next is asked for; peak extra memory is at
        most two buckets or the largest tensor.
        """

    def local_weights(self) -> Iterator[Piece] | None:
        """Yields this rank's live pieces of the weights that `named_weights` streams, taken apart where the backend fuses them
        and without padding; together the ranks have everything, and several ranks may have the same.  Not collective.  None where
        the weights exist only as a stream (adapters that must be merged).
        """
        return None

    def adapter(self) -> Adapter | None:
        """Returns the adapters alone, in peft's terms; None for a model without.  Every rank calls it and walks the stream."""
        return None

    @abstractmethod
    def state_shards(self) -> Iterator[Piece]:
        """Yields the live pieces that this rank writes of everything a bit-exact resume needs: together the ranks yield every
        element, replicas once.  Names are the same for every backend: `model.<name>`, `optim.exp_avg.<name>` and
        `optim.exp_avg_sq.<name>`, <name> as in the Hugging Face checkpoint (experts apart, tied weights once as the input
        embedding, no padding); adapters under their own names.  A piece's memory must stay valid until the stream ends.
        """

    @abstractmethod
    def load_state(self, read: Callable[[Piece], Tensor]) -> None:
        """Fills live state, on every rank all of its own.  For each expected piece (its `tensor` says dtype and sizes) `read`
        returns that region from the checkpoint, whatever layout or backend wrote it."""

    @abstractmethod
    def scalar_state(self) -> dict[str, int | float]:
        """Returns step counts and schedule position, JSON-able; same on every rank and of every backend: `optimizer_steps` taken
        and `skipped_steps`, whose sum is the schedule's position; {} without an optimizer."""

    @abstractmethod
    def load_scalar_state(self, state: Mapping[str, int | float]) -> None:
        """Continues from `scalar_state`."""

    @abstractmethod
    def onload(self) -> None:
        """Brings offloaded weights to the device, as passes and streams do by themselves.  Optimizer state that is offloaded
        stays in host memory: it is on the device while `optimizer_step` writes it, and at no other time (a checkpoint is written
        from host memory).  No-op without offloading."""

    @abstractmethod
    def offload(self) -> None:
        """Moves weights to host memory where configured, and returns memory that the device's allocator keeps for later passes to
        the device, for another engine (a rollout engine).  No-op on CPU."""
