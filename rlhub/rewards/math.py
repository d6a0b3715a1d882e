"""Competition mathematics (Hendrycks et al. 2021, arXiv 2103.03874): is the final answer equivalent to the right one?

Equal texts and plain numbers are decided here; the rest by math-verify, which builds expressions from parsed LaTeX.  Only its
LaTeX grammar is used: its reader for plain expressions hands text to Python's `eval`.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from rlhub.rewards.cpu_limit import OutOfCpuTime, cpu_limit
from rlhub.rewards.final_answer import MAX_STATED, after_hashes, boxed, stated
from rlhub.rewards.numbers import clean, whole_number

CPU_LIMIT_S = 6.0
"""CPU time of a comparison: an answer that takes more (a tower of powers) is a wrong answer, not a failure.  math-verify's own
limits are by the clock, and on a busy machine made right answers wrong."""
LATEX = [LatexExtractionConfig()]
_CHOICE = re.compile(r"\(?([A-Z])\)?")
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """1.0 for an equivalent answer, 0.0 for another or none.  ground_truth: the answer, or a solution with it in a box."""
    truth = str(ground_truth)
    in_box = boxed(truth)
    expected = in_box[1] if in_box else truth
    if not expected.strip():
        raise ValueError(f"ground_truth {truth[:80]!r} states no answer")
    answer = final_answer(solution_str)
    return float(answer is not None and equivalent(answer, expected))


def final_answer(text: str) -> str | None:
    """What is in the last box, else after the last "the answer is" or `####`."""
    in_box = boxed(text)
    if in_box is not None:
        return in_box[1]
    statements = sorted((*after_hashes(text), *stated(text)))
    return statements[-1][1] if statements else None


def equivalent(answer: str, expected: str) -> bool:
    """Whether two answers, in LaTeX or plain, are the same."""
    left, right = _bare(answer), _bare(expected)
    if not left or len(left) > MAX_STATED:
        return False
    if left == right:
        return True
    choices = _CHOICE.fullmatch(left), _CHOICE.fullmatch(right)
    if choices[0] and choices[1]:
        return choices[0][1] == choices[1][1]
    numbers = whole_number(left, units=False), whole_number(right, units=False)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    try:
        with cpu_limit(CPU_LIMIT_S):
            gold = parse(f"${expected.strip(' $')}$", LATEX, parsing_timeout=None)
            own = parse(f"${answer.strip(' $')}$", LATEX, parsing_timeout=None)
            return bool(gold) and bool(own) and bool(verify(gold, own, timeout_seconds=None))
    except OutOfCpuTime:
        return False


def _bare(answer: str) -> str:
    """Cleaned, without outer dollar signs, a final full stop and double spaces."""
    return " ".join(clean(answer.strip(" $")).rstrip(".").split())
