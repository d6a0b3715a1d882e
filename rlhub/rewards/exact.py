"""Score 1 when the response is the ground truth, white space aside."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 if both texts are the same sequence of words, else 0.0."""
    return float(solution_str.split() == str(ground_truth).split())
