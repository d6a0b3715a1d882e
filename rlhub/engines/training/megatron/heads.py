"""From the last stage's hidden states to what a loss reads: log-probs of the targets, values, scores.

The hidden states are the same on all tensor-parallel ranks.  The model knows how their gradient comes back: as parts that are
summed where each rank multiplies with rows of its own, as it is where all have the same scalar head.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch
import torch.distributed as dist
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
