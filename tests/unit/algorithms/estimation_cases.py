"""A training batch with all columns that the work on it reads, and its cuts over ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

PROMPT, VERSION = 2, 7
KNOBS = {
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": -1.0, "clip_cov_ub": 1.0},
    "kl_cov": {"kl_cov_ratio": 0.25},
}
"""Knobs with which a loss chooses some tokens of a small batch."""
Columns = Mapping[str, Tensor]


def make_batch(seed: int, num_rows: int, width: int) -> dict[str, Tensor]:
    """A batch in sampled order: ragged rows, tool output between turns, an empty one, failures; NaN where no token is."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(num_rows, width, generator=generator)

    lengths = torch.randint(0, width + 1, (num_rows,), generator=generator)
    attended = torch.arange(width)[None] < lengths[:, None]
    mask = (attended & (torch.rand(num_rows, width, generator=generator) < 0.8)).long()
    nowhere = torch.where(mask.bool(), 0.0, math.nan)
    old = -normal().abs() + nowhere
    tokens = torch.ones(num_rows, PROMPT).long()
    tokens[::2, 0] = 0
    scores = torch.randint(0, 4, (num_rows,), generator=generator) / 3.0
    place = torch.arange(num_rows)  # three rows a prompt: an episode of two calls, and one of a single call
    return {
        "sample_index": torch.arange(num_rows),
        "uid": torch.arange(num_rows) // 3 + 40,
        "mini_batch": torch.arange(num_rows) // 5,
        "valid": torch.rand(num_rows, generator=generator) < 0.9,
        "scores": scores,
        "finish_reason": torch.randint(0, 3, (num_rows,), generator=generator),
        "response_length": lengths,
        "attention_mask": torch.cat([tokens, attended.long()], 1),
        "response_mask": mask,
        "old_log_probs": old,
        "ref_log_prob": old + normal(0.3),
        "rollout_log_probs": old + normal(0.2),
        "sum_pi_squared": normal().sigmoid() + nowhere,
        "values": normal() + nowhere,
        "baseline_rewards": torch.rand(num_rows, generator=generator),
        "reward/right": scores.double(),
        "reward/short": torch.rand(num_rows, generator=generator, dtype=torch.float64),
        "policy_version": torch.randint(3, VERSION + 1, (num_rows, width), generator=generator),
        "episode": place // 3 * 2 + (place % 3 == 2),
        "call": (place % 3 == 1).long(),
        "terminated": torch.rand(num_rows, generator=generator) < 0.5,
        "next_values": torch.randn(num_rows, generator=generator),
    }


def cut(columns: Columns, width: int, ranks: list[Tensor]) -> list[dict[str, Tensor]]:
    """The rows of each rank, with tokens padded on the right as far as its own longest row needs."""
    parts = []
    for rows in ranks:
        own = int(columns["response_length"][rows].max()) if len(rows) else 1
        part = {name: column[rows] for name, column in columns.items()}
        tokens = {name: column[:, : max(own, 1)] for name, column in part.items() if column.shape[1:] == (width,)}
        parts.append(part | tokens | {"attention_mask": part["attention_mask"][:, : PROMPT + max(own, 1)]})
    return parts
