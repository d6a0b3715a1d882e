"""Metrics the driver computes from a training batch, under the names people look for."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhub.protocol import DataProto


def spread(prefix: str, values: Tensor) -> dict[str, float]:
    """mean, max and min of a flat tensor; nothing for an empty one.  Sums are float64: float32 has no room for two of its
    largest numbers."""
    if values.numel() == 0:
        return {}
    low, high = torch.aminmax(values)
    return {f"{prefix}/mean": values.mean(dtype=torch.float64).item(), f"{prefix}/max": high.item(), f"{prefix}/min": low.item()}


def batch_metrics(batch: DataProto) -> dict[str, float]:
    """reward/..., critic/{score,rewards,advantages,returns,values}/..., response_length/..., prompt_length/... of one step.

    Samples without a valid score count in lengths only: the 0 that stands in for their score would pass for a bad answer.
    """
    columns = batch.batch
    valid = columns["valid"]
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
    """One number per metric from what the ranks returned; none for a metric that no rank returned."""
    return {name: sum(v) / len(v) if isinstance(v, list) else float(v) for name, v in collected.items() if v != []}
