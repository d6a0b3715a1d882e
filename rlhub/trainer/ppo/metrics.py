"""Metrics that the driver computes from a training batch, under the field's names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhub.algorithms.statistics import Moments, batch_moments, row_moments, row_sums
from rlhub.protocol import DataProto
from rlhub.utils.timing import PREFIX

PER_RESPONSE_TOKEN = {"gen": "generate_sequences"}
PER_TOKEN = {
    "ref": "compute_ref_log_prob",
    "values": "compute_values",
    "adv": "advantages",
    "update_critic": "update_critic",
    "update_actor": "update_actor",
}
"""The field's name of a phase -> the phase, whose time is divided by the tokens of prompts and responses."""


def metric_rows(batch: DataProto, valid: Tensor) -> dict[str, Tensor]:
    """Returns `row_moments` of what is reported of each row, by name, (rows, 5) float64; a rank can compute those of its rows.

    valid: (rows,) bool.  Samples without a valid score count in lengths only: the 0 that stands in for their score would pass for
    a bad answer.
    """
    columns, every = batch.batch, torch.ones_like(valid)
    mask = columns["response_mask"].bool() & valid[:, None]
    tokens, lengths = columns["attention_mask"].sum(1), columns["response_length"]
    tensors = {name: columns[name] for name in ("advantages", "returns", "values") if name in columns.keys()}
    return {
        "response_length": row_moments(lengths, every),
        "response_length/clip_ratio": row_moments(columns["finish_reason"] == 1, every),
        "prompt_length": row_moments(tokens - lengths, every),
        "critic/score": row_moments(columns["scores"], valid),
        "critic/rewards": row_moments(row_sums(columns["token_level_rewards"], mask), valid),
        **{f"critic/{name}": row_moments(column, mask) for name, column in tensors.items()},
        "perf/total_num_tokens": row_moments(tokens, every),
    }


def batch_metrics(rows: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns reward/..., critic/{score,rewards,advantages,returns,values}/..., response_length/... and prompt_length/... out of
    `metric_rows` in the order of the rows."""
    moments = {name: batch_moments(column) for name, column in rows.items()}
    clipped, tokens = moments.pop("response_length/clip_ratio"), moments.pop("perf/total_num_tokens")
    metrics = {name: value for prefix, found in moments.items() for name, value in spread(prefix, found).items()}
    metrics["response_length/clip_ratio"] = clipped.mean.item()
    metrics["perf/total_num_tokens"] = tokens.total.item()
    scores = moments["critic/score"]
    if scores.count > 0:
        metrics |= {"reward/mean": scores.mean.item(), "reward/std": (scores.squares / scores.count).sqrt().item()}
    return metrics


def spread(prefix: str, moments: Moments) -> dict[str, float]:
    """Returns mean, max and min; nothing where there is no value."""
    if moments.count == 0:
        return {}
    return {
        f"{prefix}/mean": moments.mean.item(),
        f"{prefix}/max": moments.highest.item(),
        f"{prefix}/min": moments.lowest.item(),
    }


def mean_metrics(collected: dict[str, list[float]] | dict[str, float]) -> dict[str, float]:
    """Returns one number per metric from what the ranks returned; none for a metric that no rank returned."""
    return {name: sum(v) / len(v) if isinstance(v, list) else float(v) for name, v in collected.items() if v != []}


def timing_per_token(timings: Mapping[str, float], batch: DataProto) -> dict[str, float]:
    """Returns timing_per_token_ms/{gen,ref,values,adv,update_critic,update_actor} of the phases that a step has had.

    timings: timing_s/... of the step.  Generation is divided by the response tokens of the batch that trains, the other phases
    by all of its tokens (verl's definition).
    """
    num_tokens = batch.batch["attention_mask"].sum().item()
    num_response_tokens = batch.batch["response_length"].sum().item()
    found = {}
    for phases, tokens in ((PER_RESPONSE_TOKEN, num_response_tokens), (PER_TOKEN, num_tokens)):
        for name, phase in phases.items():
            if tokens and PREFIX + phase in timings:
                found[f"timing_per_token_ms/{name}"] = timings[PREFIX + phase] * 1000 / tokens
    return found
