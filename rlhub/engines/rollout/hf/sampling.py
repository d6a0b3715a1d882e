"""From logits to a token and its log-probability: temperature, top-k, top-p, then inverse-CDF sampling.

The uniform of token `index` of a completion is a pure function of (seed, index), so a completion is the same whatever batch it is
generated in.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlhub.engines.rollout.base import SamplingParams
from rlhub.utils.seeding import Purpose, random_bits

FLOAT32_BITS = np.uint64(40)  # 64 - 24: what is left fits a float32 exactly, so the result stays below 1


def token_uniforms(seeds: Iterable[int], firsts: Iterable[int], count: int) -> NDArray[np.float32]:
    """Returns uniforms in [0, 1) for tokens first .. first + count - 1 of each seed; (rows, count) float32."""
    pairs = zip(seeds, firsts, strict=True)
    bits = np.array([random_bits(seed, Purpose.TOKEN, first=first, count=count) for seed, first in pairs], dtype=np.uint64)
    return (bits >> FLOAT32_BITS).astype(np.float32) * np.float32(2.0**-24)


def sample_tokens(logits: Tensor, noise: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Samples one token a row, with its log-probability under the distribution it was drawn from.

    logits: (rows, vocabulary), any floating dtype; noise: (rows,) float32 uniforms in [0, 1).
    Returns tokens (rows,) int64 and log-probs (rows,) float32.  temperature 0 takes the most likely token and gives its
    log-probability at temperature 1.
    """
    if params.temperature == 0.0:
        return _greedy(logits.float())
    scaled = logits.float()
    if params.temperature != 1.0:
        scaled = scaled / params.temperature
    probabilities = _truncate(scaled, params).softmax(dim=-1)
    # A GPU sums in parallel, so in float32 the sums would also rise at tokens of no probability, and these could be drawn.
    cumulative = (probabilities.double() if probabilities.is_cuda else probabilities).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The product may round up to the total, beyond which there is no token; the float below it selects the last one.
    target = torch.minimum(noise[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target, right=True)
    return tokens[:, 0], probabilities.gather(1, tokens).log()[:, 0]


def _greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, tokens = logits.max(dim=-1)
    return tokens, best - logits.logsumexp(dim=-1)


def _truncate(logits: Tensor, params: SamplingParams) -> Tensor:
    """Returns logits with everything outside top-k, then outside the nucleus of top-p, at minus infinity."""
    if params.top_k > 0 and params.top_k < logits.shape[-1]:
        floor = logits.topk(params.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < floor, -torch.inf)
    if params.top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(dim=-1)
        # The nucleus is the shortest prefix whose mass reaches top_p: a token is out if the mass BEFORE it suffices.
        outside = probabilities.cumsum(dim=-1) - probabilities >= params.top_p
        logits = logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)
    return logits
