"""Scores competition mathematics (Hendrycks et al. 2021, arXiv 2103.03874) by the equivalence of final answers.

Equal texts and plain numbers are compared here, and all others by math-verify, which builds expressions from parsed LaTeX.  Only
its LaTeX grammar is used: its reader for plain expressions passes text to Python's `eval`.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from rlhub.rewards.answers import MAX_STATED, after_hashes, boxed, clean, stated, whole_number

CPU_LIMIT_S = 6.0
"""CPU seconds of a comparison: an answer that takes more (a tower of powers) is a wrong answer, not a failure.  math-verify's own
limits use the clock, and on a busy machine made right answers wrong."""
LATEX = [LatexExtractionConfig()]
_CHOICE = re.compile(r"\(?([A-Z])\)?")
logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Returns 1.0 for an equivalent answer, 0.0 for another or none.  ground_truth: the answer, or a solution that boxes it."""
    truth = str(ground_truth)
    in_box = boxed(truth)
    expected = in_box[1] if in_box else truth
    if not expected.strip():
        raise ValueError(f"ground_truth {truth[:80]!r} states no answer")
    answer = final_answer(solution_str)
    return float(answer is not None and equivalent(answer, expected))


def final_answer(text: str) -> str | None:
    """Returns the content of the last box, else the text after the last "the answer is" or `####`."""
    in_box = boxed(text)
    if in_box is not None:
        return in_box[1]
    statements = sorted((*after_hashes(text), *stated(text)))
    return statements[-1][1] if statements else None


def equivalent(answer: str, expected: str) -> bool:
    """Returns True where two answers, in LaTeX or plain, are equivalent."""
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
    """Cleans an answer and removes outer dollar signs, a final full stop and double spaces."""
    return " ".join(clean(answer.strip(" $")).rstrip(".").split())


class OutOfCpuTime(BaseException):
    """A limit of CPU time was reached.  It is no Exception, because libraries catch those where they can continue without one."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfCpuTime in the block as soon as this process has used so many seconds of CPU time, however busy the machine is.

    Only Python's main thread can be interrupted; in other threads there is no limit.  Code that never returns to Python is not
    interrupted, so reward functions also run in processes that can be killed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGPROF, _interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)


def _interrupt(*_: object) -> None:
    raise OutOfCpuTime
