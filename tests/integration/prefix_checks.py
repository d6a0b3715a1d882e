"""What the ranks of test_prefix_packing.py run."""

from __future__ import annotations

import random

import torch

from rlhub.engines.training.micro_batch import MicroBatchConfig
from tests.integration.fsdp_checks import POLICY_OUTPUTS, make_engine, my_rows, policy_loss
from tests.support.forests import conversations, rows_of


def compare_on_ranks(path: str, num_cases: int) -> tuple[float, float]:
    """Returns the largest relative distance of this rank's gradient from that of rows alone, and the ratio of tokens; in every
    second case the last rank has no rows."""
    limits = (MicroBatchConfig(max_tokens=60), MicroBatchConfig(max_tokens=60, share_prefixes=True))
    engines = [make_engine(path, fsdp={"model_dtype": "fp32"}, micro_batch=limit) for limit in limits]
    worst, tokens = 0.0, [0.0, 0.0]
    for seed in range(num_cases):
        rows = rows_of(conversations(random.Random(seed), most_rows=24), seed)
        mine, loss = my_rows(rows, uneven=seed % 2 == 1), policy_loss(float(rows["response_mask"].sum()))
        grads = []
        for engine in engines:
            sums = engine.forward_backward(mine, loss, outputs=POLICY_OUTPUTS)
            grads.append(torch.cat([grad.flatten() for param in engine.params if (grad := param.local_grad) is not None]))
        tokens[0] += sums["prefix_rows"]
        tokens[1] += sums["prefix_computed"]
        worst = max(worst, float((grads[0] - grads[1]).norm() / grads[0].norm()))
    return worst, tokens[0] / tokens[1]
