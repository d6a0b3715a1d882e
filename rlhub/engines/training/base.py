"""TrainEngine: the interface of every training backend to the workers above it.

One engine has one model (policy, value or reward model) sharded over the ranks of a process group.  Unless a method says
otherwise, EVERY rank calls it, in the same order, and it blocks.  Rows stay on the rank that was given them; quantities over
all rows (denominators of losses, statistics) go through `reduce`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhub.engines.training.expert_load import ExpertLoad
from rlhub.protocol.weights.pieces import Piece

Rows = Mapping[str, Tensor]
"""Columns of equal length, whose first axis is the rows.  An engine reads `input_ids` and `attention_mask` (rows, prompt +
response), and the width of the response from `responses` or `response_mask` (rows, response); a reward model reads only the
first two.  Position ids are derived from the attention mask."""


@dataclass(slots=True, kw_only=True)
class ForwardOutputs:
    """The outputs of one micro-batch, float32, or float64 for a float64 model.

    They are per token (rows, response), zero where response_mask is 0, or per row (rows,).
    """

    log_probs: Tensor | None = None  # log pi(token), with the logits divided by the temperature
    entropy: Tensor | None = None  # the entropy of the full distribution after temperature
    sum_pi_squared: Tensor | None = None  # the sum of that distribution's squared probabilities; carries no gradient
    values: Tensor | None = None
    scores: Tensor | None = None  # (rows,), at each row's last attended token; 0 for a filler row, which has none
    flow_errors: Tensor | None = None  # squared errors of the numbers of actions, in the places of their tokens


@dataclass(slots=True, kw_only=True)
class LossOutput:
    """The result of a loss function for one micro-batch.

    loss: a scalar, this micro-batch's SHARE of the optimizer step's loss: the sum over all micro-batches and ranks is the step's
        loss, because denominators are global counts.
    sums: named scalars that are summed over micro-batches and ranks, as numerators or denominators of metrics.
    """

    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)


ADAPTER_BUCKET_BYTES = 64 << 20
"""The bucket size of adapters, which are small: a bucket gathers those of many layers at once."""
LossFunction = Callable[[ForwardOutputs, Rows], LossOutput]


@dataclass(slots=True, kw_only=True)
class StepReport:
    """The result of `optimizer_step`.  skipped: loss or gradient was not finite, so the weights are unchanged."""

    grad_norm: float
    lr: float
    skipped: bool


@dataclass(slots=True, kw_only=True)
class TokenCounts:
    """The tokens of one `forward_backward` or `infer` on this rank, where rows share prefixes.

    rows: the tokens of all rows that the loss needs.
    distinct: the same, with a prefix that several rows share counted once.
    computed: the tokens that went through the model.
    """

    rows: int
    distinct: int
    computed: int = 0

    @property
    def ratio(self) -> float:
        """Returns the tokens of the rows for each one that was computed."""
        return self.rows / max(self.computed, 1)


@dataclass(slots=True, kw_only=True)
class Adapter:
    """LoRA adapters in peft's format.

    config: the content of adapter_config.json.
    buckets: the tensors of adapter_model.safetensors, as a stream like that of `named_weights`.
    """

    config: dict[str, Any]
    buckets: Iterator[list[tuple[str, Tensor]]]


class TrainEngine(ABC):
    """A training engine; see the module docstring.

    dp_rank, dp_size: the number of this rank's shard of the rows, and the number of shards.  Ranks that share a model copy
        (tensor, pipeline) share a shard.
    is_collect: True on the one rank of each shard whose outputs are returned for it; all ranks of the shard compute the same
        outputs.
    expert_load: of the passes with gradients; None for a model without experts.
    token_counts: of the last passes; None for an engine whose rows share no prefixes.
    publishes_adapters: True gives a rollout engine the LoRA adapters alone; set before the first update.
    """

    dp_rank: int
    dp_size: int
    is_collect: bool
    device: torch.device
    token_counts: TokenCounts | None = None
    expert_load: ExpertLoad | None = None
    publishes_adapters: bool = False

    @abstractmethod
    def initialize(self) -> None:
        """Builds and shards the model, the optimizer and the schedule.  Call once, after the process group exists."""

    @abstractmethod
    def forward_backward(
        self, rows: Rows, loss_fn: LossFunction, *, outputs: Iterable[str] = ("log_probs",), rows_per_unit: int = 1
    ) -> dict[str, float]:
        """Accumulates the gradient of one optimizer step over `rows`, which are cut into micro-batches.

        Returns the global sums of `loss` and of LossOutput.sums, and where rows share prefixes of `prefix_` + each of
        TokenCounts.  Gradients start from zero.  Ranks may have different numbers of rows, and also none.

        outputs: the outputs that the loss reads, of "log_probs", "entropy", "values", "scores"; nothing else is computed.
        rows_per_unit: this many neighbouring rows always stay together and in order, for a loss that compares them.  Each rank
            has whole units; a rank without rows left passes one unit that is masked everywhere.
        """

    @abstractmethod
    def optimizer_step(self) -> StepReport:
        """Clips the gradient, steps unless loss or gradient is not finite, advances the schedule, and zeroes the gradients."""

    @abstractmethod
    def infer(self, rows: Rows, *, outputs: Iterable[str], adapters: bool = True) -> dict[str, Tensor]:
        """Computes the named outputs without gradient; returns them on the CPU as float32 (float64 for a float64 model), in
        the shapes of ForwardOutputs and the order of the rows.

        adapters: False computes with LoRA adapters off, as the reference policy of a LoRA run does.
        """

    @abstractmethod
    def reduce(self, values: Tensor, op: str = "sum", *, every_rank: bool = False) -> Tensor:
        """Reduces ("sum", "max" or "min") a small tensor over the data-parallel ranks; returns a new tensor.

        every_rank: True reduces over all ranks, for quantities that differ inside a shard too.
        """

    @abstractmethod
    def gather(self, rows: Tensor) -> Tensor:
        """Returns the rows of all data-parallel ranks, one rank's after the other's; (rows, ...) on the CPU, of any dtype.

        Ranks may have different numbers of rows, and also none.  Of two-dimensional tensors the narrower ones are padded with
        zeros on the right.
        """

    @abstractmethod
    def named_weights(self, *, bucket_bytes: int = 256 << 20) -> Iterator[list[tuple[str, Tensor]]]:
        """Streams the full weights under their Hugging Face names in buckets of about `bucket_bytes`; a larger tensor is a
        bucket of its own.

        Every rank gets the same buckets.  Adapters are merged into the weights.  A tied weight appears once, under the input
        embedding's name.  A bucket's tensors are valid until the next bucket is requested; the peak of extra memory is two
        buckets or the largest tensor.
        """

    def published_weights(self, *, bucket_bytes: int = 256 << 20) -> Iterator[list[tuple[str, Tensor]]]:
        """Streams, as `named_weights` does, what a rollout engine gets: the full weights, or with `publishes_adapters` each A
        and each B of the adapters, under the names in peft's files.  B is multiplied by the scale alpha / rank."""
        return self.named_weights(bucket_bytes=bucket_bytes)

    def local_weights(self) -> Iterator[Piece] | None:
        """Yields this rank's live pieces of the weights that `published_weights` streams, without padding; not collective.

        Weights that the backend fuses are taken apart.  Together the ranks have every element, and several ranks may have the
        same one.  Returns None where the weights exist only as a stream, because adapters must be merged.
        """
        return None

    def adapter(self) -> Adapter | None:
        """Returns the adapters alone in peft's format, or None for a model without any.  Every rank calls it and iterates over
        the stream."""
        return None

    @abstractmethod
    def state_shards(self) -> Iterator[Piece]:
        """Yields the live pieces that this rank writes of everything a bit-exact resume needs.

        Together the ranks yield every element, and replicas once.  Names are the same for every backend: `model.<name>`,
        `optim.exp_avg.<name>` and `optim.exp_avg_sq.<name>`, with <name> as in the Hugging Face checkpoint (a tensor for each
        expert, tied weights once as the input embedding, no padding); adapters have names of their own.  A piece's memory must
        stay valid until the stream ends.
        """

    @abstractmethod
    def load_state(self, read: Callable[[Piece], Tensor]) -> None:
        """Fills all live state of every rank.

        read: returns the region of an expected piece, whose `tensor` gives dtype and sizes, from the checkpoint, whatever
        layout or backend wrote it.
        """

    @abstractmethod
    def scalar_state(self) -> dict[str, int | float]:
        """Returns step counts and the position in the schedule, as JSON-able numbers that are the same on every rank and for
        every backend.

        They are `optimizer_steps`, the steps taken, and `skipped_steps`; their sum is the schedule's position.  An engine
        without an optimizer returns {}.
        """

    @abstractmethod
    def load_scalar_state(self, state: Mapping[str, int | float]) -> None:
        """Continues from the counts that `scalar_state` returned."""

    @abstractmethod
    def onload(self) -> None:
        """Brings offloaded weights to the device, as passes and streams do by themselves; does nothing without offloading.

        Offloaded optimizer state stays in host memory: it is on the device only while `optimizer_step` writes it, and a
        checkpoint is written from host memory.
        """

    @abstractmethod
    def offload(self) -> None:
        """Moves weights to host memory where configured, and returns the memory that the device's allocator has cached, for
        another engine (a rollout engine) to use.  Does nothing on CPU."""
