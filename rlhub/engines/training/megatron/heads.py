"""From the last stage's hidden states to what a loss reads: log-probs of the targets, values, scores.

The hidden states are those of the rank's own tokens, under context parallelism a slice of them all, and the same on all
tensor-parallel ranks.  The model knows how their gradient comes back: as parts that are summed where each rank multiplies with
rows of its own, as it is where all have the same scalar head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from rlhub.engines.training.megatron.logprob import token_outputs, vocab_shard
from rlhub.engines.training.packing import ModelInputs


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
    """Of each target: (S,) each, the same on the ranks of `group`.  hidden (tokens, hidden); weight: this rank's rows of the
    output layer."""
    shard = vocab_shard(weight, vocab_size, group)
    states = hidden.index_select(0, inputs.sources)
    return token_outputs(states, weight, inputs.targets, shard=shard, temperature=temperature, wanted=wanted)


def scalar_output(hidden: Tensor, weight: Tensor, inputs: ModelInputs) -> Tensor:
    """One number (S,) of the state at each source token, float32; weight (1, hidden)."""
    return torch.nn.functional.linear(hidden.index_select(0, inputs.sources), weight).squeeze(-1).float()


@dataclass(slots=True, kw_only=True)
class OwnOutputs:
    """The numbers of a micro-batch that this context-parallel rank computes: those whose source is one of its tokens.

    inputs: as the heads read them, sources counted from the rank's first token.  places: of its numbers among all `count`.
    """

    inputs: ModelInputs
    places: Tensor
    count: int

    def gathered(self, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Every rank's numbers, (count,), from this rank's.  Back, each keeps the gradient of its own: all compute the same
        loss, and what they make of it is parts of the weights' gradients."""
        everyones = values.new_zeros(self.count).index_put((self.places,), values)
        summed: Tensor = reduce_from_tensor_model_parallel_region(everyones, group)
        return summed


def own_outputs(inputs: ModelInputs, tokens: slice) -> OwnOutputs:
    """tokens: those this rank has."""
    sources, targets = inputs.sources, inputs.targets
    places = ((sources >= tokens.start) & (sources < tokens.stop)).nonzero().squeeze(1)
    own = dataclasses.replace(
        inputs, sources=sources[places] - tokens.start, targets=targets[places] if targets.numel() else targets
    )
    return OwnOutputs(inputs=own, places=places, count=sources.numel())
