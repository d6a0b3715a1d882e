"""Reward of the tool task.  Imports nothing of rlhub: it runs in the reward workers."""

from __future__ import annotations

import random
import re
from typing import Any

NUMBER = re.compile(r"\d+")
ANSWERED = "</tool_response>"
CHANCE = 0.3
"""Share of rewarded episodes in the control: about the share that calls at the start."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """score: 1.0 if the answer is the product, however it was found.  called: 1.0 if the calculator was asked and answered.

    The answer is the number after the last tool response: what a tool said is not an answer until the model says it.
    """
    before, asked, answer = solution_str.rpartition(ANSWERED)
    numbers = NUMBER.findall(answer) if "<tool_call>" not in answer else []
    called = float(bool(asked) and "Error" not in before)
    return {"score": float(bool(numbers) and numbers[-1] == ground_truth), "called": called}


def compute_chance_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """The control: in training a coin decides, whatever the episode; validation is scored as always.

    A run with this reward must not get better.  If it does, something else than the reward teaches.
    """
    found = compute_score(data_source, solution_str, ground_truth, extra_info)
    if extra_info["split"] == "val":
        return found
    return {**found, "score": float(random.random() < CHANCE)}
