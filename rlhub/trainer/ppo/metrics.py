"""Metrics that the driver computes from a training batch, under the field's names."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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


def spread(prefix: str, values: Tensor) -> dict[str, float]:
    """Returns mean, max and min of a flat tensor; nothing for an empty one.  Sums are float64: float32 has no room for two of its
    largest numbers."""
    if values.numel() == 0:
        return {}
    low, high = torch.aminmax(values)
    return {f"{prefix}/mean": values.mean(dtype=torch.float64).item(), f"{prefix}/max": high.item(), f"{prefix}/min": low.item()}


def batch_metrics(batch: DataProto, valid: Tensor) -> dict[str, float]:
    """Returns reward/..., critic/{score,rewards,advantages,returns,values}/..., response_length/... and prompt_length/....

    valid: (rows,) bool.  Samples without a valid score count in lengths only: the 0 that stands in for their score would pass for
    a bad answer.
    """
    columns = batch.batch
    mask = columns["response_mask"].bool() & valid[:, None]
    scores = columns["scores"][valid].double()
    lengths = columns["response_length"].float()
    prompts = columns["attention_mask"].sum(1).float() - lengths
    metrics = {
        **spread("response_length", lengths),
        "response_length/clip_ratio": (columns["finish_reason"] == 1).float().mean().item(),
        **spread("prompt_length", prompts),
        **spread("critic/score", scores),
        **spread("critic/rewards", torch.where(mask, columns["token_level_rewards"], 0).sum(1, dtype=torch.float64)[valid]),
        **spread("critic/advantages", columns["advantages"][mask]),
        **spread("critic/returns", columns["returns"][mask]),
        "perf/total_num_tokens": float(columns["attention_mask"].sum().item()),
    }
    if len(scores):
        metrics |= {"reward/mean": scores.mean().item(), "reward/std": scores.std(correction=0).item()}
    if "values" in columns.keys():
        metrics |= spread("critic/values", columns["values"][mask])
    return metrics


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
