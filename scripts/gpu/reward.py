"""The reward of acceptance.py's GRPO step.  It imports nothing: rlhub runs it in the processes of the reward."""

from __future__ import annotations


def score(text: str) -> float:
    """Returns the share of words whose number is even, so that the samples of a prompt differ."""
    words = text.split()
    return sum(word[-1:] in "02468" for word in words) / max(len(words), 1)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    """Returns `score`, with the signature of rlhub's reward functions."""
    return score(solution_str)
