"""Grade-school mathematics (Cobbe et al. 2021, arXiv 2110.14168): is the stated final answer the right number?

The answer must be stated: after `####`, in `\\boxed{}`, after "the answer is", or as all there is.  The last statement counts.
A right number anywhere else scores 0, or a policy would learn to list numbers, and a response cut off in the middle of its
working could be right by accident.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from rlhub.rewards.answers import LONGEST, after_hashes, boxed, clean, leading_number, stated, whole_number


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Returns 1.0 for the right number, 0.0 for another or none.  ValueError if the ground truth is no number."""
    text = str(ground_truth)
    expected = whole_number(clean(text.rsplit("####", 1)[-1]), units=False)
    if expected is None:
        raise ValueError(f"ground_truth {text[:80]!r} is not a number")
    return float(final_number(solution_str) == expected)


def final_number(text: str) -> Fraction | None:
    """Returns the number of the last statement of an answer, None without one."""
    candidates = sorted(_candidates(text), key=lambda candidate: candidate[0])
    if candidates:
        return candidates[-1][1]
    bare = len(text) <= LONGEST and "=" not in text  # an equation may be any step of a working
    return whole_number(clean(text), units=True) if bare else None


def _candidates(text: str) -> Iterator[tuple[int, Fraction | None]]:
    """Yields (position, number) of the last valid statement of each form; a box counts as a statement whatever is in it."""
    for statements in (after_hashes(text), stated(text)):
        numbers = ((position, leading_number(clean(answer))) for position, answer in statements)
        yield from ((position, number) for position, number in _first_valid(numbers))
    in_box = boxed(text)
    if in_box is not None:
        yield in_box[0], whole_number(clean(in_box[1]), units=True)


def _first_valid(numbers: Iterator[tuple[int, Fraction | None]]) -> Iterator[tuple[int, Fraction | None]]:
    for position, number in numbers:
        if number is not None:
            yield position, number
            return
