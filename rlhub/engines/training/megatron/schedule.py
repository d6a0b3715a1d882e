"""A step's micro-batches through Megatron-core's pipeline schedules: one stage, several, or interleaved pieces of stages.

Every rank of a model copy is given the same rows and cuts them alike; hidden states travel between the stages, and the last
turns them into outputs.  Nothing here divides a loss or a gradient: the loss of a micro-batch is a share already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlhub.engines.training.base import Rows
from rlhub.engines.training.packing import ModelInputs


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """indices: the rows' places in the rank's batch; none for filler rows."""

    rows: Rows
    inputs: ModelInputs
    indices: list[int]


Finish = Callable[[MicroBatch, nn.Module, Tensor], Tensor]
"""(micro-batch, last piece of the model, hidden states) -> loss; called on the last pipeline stage alone."""


def prepare_schedule(config: TransformerConfig) -> None:
    """Settings that the schedules read from the model's configuration, in place.

    Interleaved stages of two pipeline ranks are each other's next and previous: forward and backward messages must then go
    apart, or they are taken for each other.
    """
    config.calculate_per_token_loss = True  # gradients are summed over micro-batches and ranks, not averaged
    if config.virtual_pipeline_model_parallel_size is not None:
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False


def run_micro_batches(
    chunks: Sequence[nn.Module], make: Callable[[int], MicroBatch], count: int, finish: Finish, *, train: bool
) -> None:
    """Runs forward passes of `make(0..count - 1)`, and with `train` the backward passes and the reduction of gradients.

    chunks: this rank's pieces of the model, wrapped for data parallelism when training.  Every rank calls, with the same count.
    """

    def forward(batches: Iterator[MicroBatch], chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        hidden = chunk(batch.inputs.input_ids, batch.inputs.position_ids, batch.inputs.plan)
        return hidden, partial(_loss, finish, batch, chunk)

    batches = [map(make, range(count)) for _ in chunks]
    several = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches if several else batches[0],
        model=list(chunks) if several else chunks[0],
        num_microbatches=count,
        seq_length=1,  # read only where all micro-batches are equally long
        micro_batch_size=1,
        forward_only=not train,
    )


def _loss(finish: Finish, batch: MicroBatch, chunk: nn.Module, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Returns (loss, number of tokens, outputs to collect) for the schedules.  No tokens: nothing is divided by their number."""
    return finish(batch, chunk, hidden), torch.zeros((), dtype=torch.int), {}


def sum_gradients(model: list[nn.Module], _: Tensor | None = None, **options: Any) -> None:
    """Ends a backward pass as Megatron does (sums over data-parallel ranks, over tensor-parallel ranks where each has a part,
    over tied embeddings) without its division by a number of tokens."""
    finalize_model_grads(model, None, **options)


def passes_needed(count: int, pipeline_size: int, interleaved: bool) -> int:
    """Returns the number of passes: the interleaved schedule takes whole rounds of a micro-batch for each pipeline rank."""
    return -(-count // pipeline_size) * pipeline_size if interleaved else count
