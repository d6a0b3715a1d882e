"""Which tokens drive the policy's entropy down most: those where advantage and log-probability covary (Cui et al. 2025, "The
entropy mechanism of reinforcement learning for reasoning language models", arXiv 2505.22617).

Where we depart from the paper: its code selects in each micro-batch of each optimizer step, from the current log-probs and with
the device's random numbers, so its gradient depends on how the batch was cut.  Here tokens are selected once for each
mini-batch, before it is cut, from log-probs at the start of the update, with random keys that belong to the sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhub.algorithms.inputs import SelectionInputs
from rlhub.algorithms.masked import masked
from rlhub.algorithms.statistics import masked_total


def token_covariance(inputs: SelectionInputs) -> Tensor:
    """Returns (A - mean A)(log pi - mean log pi), means over the mini-batch's tokens; (rows, response) float64, 0 outside the
    mask."""
    mask = inputs.response_mask
    count = mask.double().sum().clamp(min=1)

    def centred(values: Tensor) -> Tensor:
        wide = masked(values.double(), mask)
        return wide - masked_total(wide, mask) / count

    return masked(centred(inputs.advantages) * centred(inputs.old_log_probs), mask)


def quota(share: float, mask: Tensor) -> int:
    """Returns the number of tokens in that share of the mini-batch, rounded down, at least one."""
    return max(int(share * int(mask.bool().sum().item())), 1)


def choose(candidates: Tensor, count: int, keys: Tensor, score: Tensor | None = None) -> Tensor:
    """Returns 1 on `count` of the candidates (all, if fewer): those of highest score, or of lowest key among equals or without
    scores.

    candidates: (rows, response) bool; keys, score: (rows, response) float64.  Returns (rows, response) uint8.
    """
    places = candidates.flatten().nonzero().squeeze(1)
    places = places[keys.flatten()[places].argsort(stable=True)]
    if score is not None:
        places = places[score.flatten()[places].argsort(stable=True, descending=True)]
    selected = torch.zeros(candidates.numel(), dtype=torch.uint8, device=candidates.device)
    selected[places[:count]] = 1
    return selected.view(candidates.shape)
