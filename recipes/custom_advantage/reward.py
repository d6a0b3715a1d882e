"""The reward of recipes/custom_advantage.  It runs in processes of its own, so it imports nothing that it does not need."""

import re


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> dict[str, float]:
    """1 if the last number is the sum; how many numbers there are becomes the metric reward/numbers."""
    numbers = re.findall(r"\d+", solution_str)
    return {"score": float(numbers[-1:] == [ground_truth]), "numbers": float(len(numbers))}
