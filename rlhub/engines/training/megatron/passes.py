"""A step's passes: micro-batches through Megatron-core's pipeline schedules, and the outputs that a loss reads.

Every rank of a model copy is given the same rows and cuts them alike.  Hidden states travel between the stages, and the last
stage turns them into outputs.  Nothing here divides a loss or a gradient, because the loss of a micro-batch is a share
already.

The last stage's hidden states are those of the rank's own tokens, which under context parallelism are a slice of all, and they
are equal on all tensor-parallel ranks.  The model determines how their gradient comes back: as parts that are summed where
each rank multiplies with rows of its own, or unchanged where all ranks have the same scalar head.

Log-probs, entropy and the sum of squared probabilities are the FSDP engine's numbers for a vocabulary that is cut over ranks,
a chunk of tokens at a time, so that the logits never exist as a whole.  A chunk costs two collectives: the maximum, and four
sums in one.  Columns that only pad the vocabulary to a multiple of the ranks are never computed, because they would take
probability from the real ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlhub.engines.training.base import Rows
from rlhub.engines.training.expert_load import ExpertLoad, of_map
from rlhub.engines.training.fsdp.logprob import add_product, chunk_tokens
from rlhub.engines.training.packing import ModelInputs


def load_of_chunks(chunks: Sequence[nn.Module], config: TransformerConfig, device: torch.device) -> ExpertLoad | None:
    """Returns the count of the tokens of experts, None for a model without; chunks: the pieces of the model on this rank."""
    if not config.num_moe_experts:
        return None
    modules = [module for chunk in chunks for module in chunk.modules()]
    routers = {module.layer_number - 1: module for module in modules if isinstance(module, TopKRouter)}
    return ExpertLoad(routers, (config.num_layers, config.num_moe_experts), of_map, device)


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """The rows and inputs of one pass.  indices: the rows' places in the rank's batch; empty for filler rows."""

    rows: Rows
    inputs: ModelInputs
    indices: list[int]


Finish = Callable[[MicroBatch, nn.Module, Tensor], Tensor]
"""A callback on the last pipeline stage: (micro-batch, last piece of the model, hidden states) -> loss."""


def prepare_schedule(config: TransformerConfig) -> None:
    """Sets, in place, the fields of the model's configuration that the schedules read.

    Interleaved stages of two pipeline ranks are each other's next and previous stage.  Forward and backward messages must then
    be sent separately, or one is taken for the other.
    """
    config.calculate_per_token_loss = True  # gradients are summed over micro-batches and ranks, not averaged
    if config.virtual_pipeline_model_parallel_size is not None:
        config.overlap_p2p_comm, config.batch_p2p_comm = True, False


def run_micro_batches(
    chunks: Sequence[nn.Module], make: Callable[[int], MicroBatch], count: int, finish: Finish, *, train: bool
) -> None:
    """Runs the forward passes of `make(0..count - 1)` and, with `train`, the backward passes and the reduction of gradients.

    chunks: this rank's pieces of the model, wrapped for data parallelism when training.  Every rank calls it, with the same
    count.
    """

    def forward(batches: Iterator[MicroBatch], chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        inputs = batch.inputs
        hidden = chunk(inputs.input_ids, inputs.position_ids, inputs.plan, inputs.experts)
        return hidden, partial(_loss, finish, batch, chunk)

    batches = [map(make, range(count)) for _ in chunks]
    several = len(chunks) > 1
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches if several else batches[0],
        model=list(chunks) if several else chunks[0],
        num_microbatches=count,
        seq_length=1,  # read only if all micro-batches are equally long
        micro_batch_size=1,
        forward_only=not train,
    )


def _loss(finish: Finish, batch: MicroBatch, chunk: nn.Module, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Returns (loss, number of tokens, outputs to collect) for the schedules.  The number is 0, so that nothing is divided by
    it."""
    return finish(batch, chunk, hidden), torch.zeros((), dtype=torch.int), {}


def sum_gradients(model: list[nn.Module], _: Tensor | None = None, **options: Any) -> None:
    """Ends a backward pass as Megatron does, without its division by a number of tokens.

    It sums over data-parallel ranks, over tensor-parallel ranks where each has a part, and over tied embeddings.
    """
    finalize_model_grads(model, None, **options)


def passes_needed(count: int, pipeline_size: int, interleaved: bool) -> int:
    """Returns the number of passes.  The interleaved schedule takes whole rounds, of one micro-batch for each pipeline rank."""
    return -(-count // pipeline_size) * pipeline_size if interleaved else count


def policy_outputs(
    hidden: Tensor,
    weight: Tensor,
    inputs: ModelInputs,
    *,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float,
    wanted: AbstractSet[str],
) -> dict[str, Tensor]:
    """Returns the wanted outputs of each target, (S,) each, equal on the ranks of `group`.

    hidden: (tokens, hidden).
    weight: this rank's rows of the output layer.
    """
    shard = vocab_shard(weight, vocab_size, group)
    states = hidden.index_select(0, inputs.sources)
    return token_outputs(states, weight, inputs.targets, shard=shard, temperature=temperature, wanted=wanted)


def scalar_output(hidden: Tensor, weight: Tensor, inputs: ModelInputs) -> Tensor:
    """Returns one number from the state at each source token, (S,) float32.  weight: (1, hidden)."""
    return torch.nn.functional.linear(hidden.index_select(0, inputs.sources), weight).squeeze(-1).float()


def own_outputs(inputs: ModelInputs, tokens: slice) -> OwnOutputs:
    """Returns the outputs that this context-parallel rank computes.  tokens: the rank's slice of the packed tokens."""
    sources, targets = inputs.sources, inputs.targets
    places = ((sources >= tokens.start) & (sources < tokens.stop)).nonzero().squeeze(1)
    own = dataclasses.replace(
        inputs, sources=sources[places] - tokens.start, targets=targets[places] if targets.numel() else targets
    )
    return OwnOutputs(inputs=own, places=places, count=sources.numel())


@dataclass(slots=True, kw_only=True)
class OwnOutputs:
    """The numbers of a micro-batch that this context-parallel rank computes: those whose source is one of its tokens.

    inputs: the inputs of these numbers, with sources counted from the rank's first token.
    places: the indices of these numbers among all `count`.
    """

    inputs: ModelInputs
    places: Tensor
    count: int

    def gathered(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Returns every rank's numbers, (count,), given this rank's.

        In the backward pass each rank takes the gradient of its own numbers: all ranks compute the same loss, and their
        gradients of the weights are parts of the sum.
        """
        of_all_ranks = values.new_zeros(self.count).index_put((self.places,), values)
        summed: Tensor = reduce_from_tensor_model_parallel_region(of_all_ranks, group)
        return summed


def token_outputs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, shard: VocabShard, temperature: float, wanted: AbstractSet[str]
) -> dict[str, Tensor]:
    """Returns the wanted outputs of "log_probs", "entropy" and "sum_pi_squared", (S,) each; see `VocabParallelLogProb`.

    temperature: divides the logits; must be positive.  All ranks of the shard's group call it with the same tokens.
    """
    names = ("log_probs", "entropy", "sum_pi_squared")
    outputs: tuple[Tensor, ...] = VocabParallelLogProb.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets, shard, 1.0 / temperature
    )
    return {name: output for name, output in zip(names, outputs, strict=True) if name in wanted}


def vocab_shard(weight: Tensor, vocab_size: int, group: dist.ProcessGroup | None) -> VocabShard:
    """Returns this rank's shard.  weight: its rows (vocabulary / ranks, hidden) of the padded output layer."""
    rows = weight.shape[0]
    several = group is not None and group.size() > 1
    first = rows * group.rank() if several and group is not None else 0
    return VocabShard(first=first, rows=rows, real=min(max(vocab_size - first, 0), rows), group=group if several else None)


@dataclass(slots=True, kw_only=True, frozen=True)
class VocabShard:
    """This rank's columns of the vocabulary.

    first: the number of the first column.
    rows: the rows of the padded weight on this rank.
    real: the number of those rows that stand for a token.
    group: the ranks that have the other columns; None if this rank has all.
    """

    first: int
    rows: int
    real: int
    group: dist.ProcessGroup | None

    def reduce(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduces in place over the ranks that share the vocabulary; returns the same tensor."""
        if self.group is not None:
            dist.all_reduce(values, op=op, group=self.group)
        return values


class VocabParallelLogProb(torch.autograd.Function):
    """Maps hidden (S, D), weight (V / ranks, D) and targets (S,) to log_probs, entropy and sum_pi_squared, each (S,), on every
    rank.

    Formulas and dtypes are those of the FSDP engine's `ChunkedLogProb`.  The gradient of `hidden` is this rank's share, which
    the model sums over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, inverse_temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        count = hidden.shape[0]
        log_probs, entropy, sum_pi_squared, normalizer = (torch.zeros(count, dtype=dtype, device=hidden.device) for _ in range(4))
        owned, index = _own_targets(targets, shard)
        size = chunk_tokens(count, shard.rows, hidden.device.type)
        for first in range(0, count, size):
            part = slice(first, first + size)
            logits = _logits(hidden[part], weight[: shard.real], inverse_temperature)
            largest = _largest(logits, shard)
            logits.sub_(largest[:, None])
            sums = logits.new_zeros(4, logits.shape[0])
            if shard.real:
                sums[2] = torch.where(owned[part], logits.gather(-1, index[part, None]).squeeze(-1), 0)
                weights = logits.exp()
                sums[0], sums[1] = weights.sum(-1), torch.linalg.vecdot(weights, logits)
                sums[3] = torch.linalg.vecdot(weights, weights)
            total, weighted, target, squares = shard.reduce(sums)
            log_total = total.log()
            log_probs[part] = target - log_total
            entropy[part] = log_total - weighted / total
            sum_pi_squared[part] = squares / total.square()
            normalizer[part] = log_total + largest
        ctx.save_for_backward(hidden, weight, owned, index, normalizer, entropy)
        ctx.shard, ctx.inverse_temperature, ctx.size = shard, inverse_temperature, size
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient, and then costs none
        ctx.mark_non_differentiable(sum_pi_squared)
        return log_probs, entropy, sum_pi_squared

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Computes the gradients from d log_prob / dz = onehot - p and d entropy / dz = -p (log p + entropy), without
        communication."""
        hidden, weight, owned, index, normalizer, entropy = ctx.saved_tensors
        real = weight[: ctx.shard.real]
        grad_log_probs = torch.zeros_like(normalizer) if grads[0] is None else grads[0]
        d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=normalizer.dtype) if ctx.needs_input_grad[1] else None
        for first in range(0, hidden.shape[0] if ctx.shard.real else 0, ctx.size):
            part = slice(first, first + ctx.size)
            log_p = _logits(hidden[part], real, ctx.inverse_temperature).sub_(normalizer[part, None])
            if grads[1] is not None:
                d_logits = log_p.exp()
                log_p.add_(entropy[part, None]).mul_(grads[1][part, None]).add_(grad_log_probs[part, None])
                d_logits.mul_(log_p).neg_()
            else:
                d_logits = log_p.exp_().mul_(grad_log_probs[part, None]).neg_()
            d_logits.scatter_add_(-1, index[part, None], torch.where(owned[part], grad_log_probs[part], 0)[:, None])
            if ctx.inverse_temperature != 1.0:
                d_logits.mul_(ctx.inverse_temperature)
            d_logits = d_logits.to(hidden.dtype)  # half-precision products on GPUs; nothing on others
            if d_weight is not None:
                add_product(d_weight[: ctx.shard.real], d_logits.t(), hidden[part])
            if d_hidden is not None:
                torch.mm(d_logits, real, out=d_hidden[part])
            del log_p, d_logits  # else they are there with the next chunk's logits
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None, None


def _own_targets(targets: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Returns (whether this rank has a target's column, the column's number on this rank or 0)."""
    local = targets - shard.first
    owned = (local >= 0) & (local < shard.real)
    return owned, torch.where(owned, local, 0)


def _largest(logits: Tensor, shard: VocabShard) -> Tensor:
    """Returns each token's largest logit over the whole vocabulary, (tokens,)."""
    local = logits.amax(-1) if shard.real else logits.new_full(logits.shape[:1], -torch.inf)
    return shard.reduce(local, dist.ReduceOp.MAX)


def _logits(hidden: Tensor, weight: Tensor, inverse_temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return logits if inverse_temperature == 1.0 else logits.mul_(inverse_temperature)
