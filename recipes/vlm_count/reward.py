"""The reward of the counting task.  Imports nothing of rlhub: it runs in the reward workers."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 if the response is the number and nothing else, else 0.0."""
    return float(solution_str.strip() == ground_truth)
