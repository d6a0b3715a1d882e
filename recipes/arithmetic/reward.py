"""Rewards of the arithmetic task.  Imports nothing of rlhub: it runs in the reward workers."""

from __future__ import annotations

import random
import re
from typing import Any

NUMBER = re.compile(r"\d+")
NUMBERS = re.compile(r"\d+( \d+)*")
CHANCE = 0.4
"""Share of rewarded samples in the control: about the share that is right at the start."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """1.0 if the last number of the response is the sum, else 0.0; how it was reached does not count."""
    numbers = NUMBER.findall(solution_str)
    return float(bool(numbers) and numbers[-1].lstrip("0") == ground_truth)


def compute_parts(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """The same score, with two numbers for estimators that read a reward's parts: `correct`, and `format`, 1.0 if the response
    is nothing but numbers with one space between them."""
    correct = compute_score(data_source, solution_str, ground_truth, extra_info)
    return {"score": correct, "correct": correct, "format": float(bool(NUMBERS.fullmatch(solution_str.strip())))}


def compute_chance_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """The control: in training a coin decides, whatever the response; validation is scored as always.

    A run with this reward must not get better.  If it does, something else than the reward teaches.
    """
    if extra_info["split"] == "val":
        return compute_score(data_source, solution_str, ground_truth, extra_info)
    return float(random.random() < CHANCE)
