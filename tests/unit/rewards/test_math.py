import pathlib
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from math_verify import parse

from rlhub.rewards.math import OutOfCpuTime, compute_score, cpu_limit


def score(text: str, truth: str) -> float:
    return compute_score("lighteval/MATH", text, truth, None)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("\\frac{1}{2}", "0.5"),
        ("\\dfrac12", "\\frac{1}{2}"),
        ("2\\sqrt{2}", "\\sqrt{8}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("x = 5", "5"),
        ("(1, 2)", "(1,2)"),
        ("\\{2,1\\}", "\\{1,2\\}"),
        ("[1,2)", "[1,2)"),
        ("90^\\circ", "90"),
        ("10\\%", "10"),
        ("10", "10\\%"),
        ("\\$32.00", "32"),
        ("1,234", "1234"),
        ("5\\text{ cm}", "5"),
        ("\\text{Evelyn}", "Evelyn"),
        ("\\text{(B)}", "B"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
    ],
)
def test_equivalent_answers(answer: str, truth: str) -> None:
    assert score(f"Some working with 3 and 4. So \\boxed{{{answer}}}.", truth) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("\\frac{1}{3}", "0.5"),
        ("x^2+1", "(x+1)^2"),
        ("[1,2]", "[1,2)"),
        ("2x", "2"),
        ("\\text{(C)}", "B"),
        ("", "5"),
        ("5, 6", "5"),
        ("\\text{Eve}", "Evelyn"),
    ],
)
def test_different_answers(answer: str, truth: str) -> None:
    assert score(f"\\boxed{{{answer}}}", truth) == 0.0


def test_an_answer_that_takes_too_long_to_compare_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhub.rewards.math.CPU_LIMIT_S", 0.3)
    assert score("\\boxed{9^{9^{9^9}}}", "2") == 0.0


def test_an_answer_is_right_however_long_the_machine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert score("\\boxed{\\frac12}", "0.5") == 1.0  # the grammar is loaded
    monkeypatch.setattr("rlhub.rewards.math.CPU_LIMIT_S", 0.5)

    def slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.3)  # of both answers together longer than the limit
        return parse(*arguments, **options)

    monkeypatch.setattr("rlhub.rewards.math.parse", slowly)
    assert score("\\boxed{\\dfrac12}", "0.5") == 1.0


def test_where_the_answer_is_taken_from() -> None:
    assert score("\\boxed{4}, no, \\boxed{5}", "5") == 1.0
    assert score("\\boxed{5}, no, \\boxed{4}", "5") == 0.0
    assert score("The final answer is $\\frac{1}{2}$. I hope it is correct.", "\\frac12") == 1.0
    assert score("so 5 it is", "5") == 0.0
    assert score("\\boxed{5}", "We find \\boxed{5}.") == 1.0


def test_a_ground_truth_without_an_answer_is_an_error() -> None:
    with pytest.raises(ValueError, match="states no answer"):
        score("\\boxed{5}", " ")


def test_model_text_is_never_evaluated(tmp_path: pathlib.Path) -> None:
    """With a control: the same texts do create the file when Python evaluates them."""
    mark = tmp_path / "evaluated"
    payloads = [
        f"__import__('pathlib').Path('{mark}').touch()",
        f"print(open('{mark}', 'w'))",
        f"(lambda: open('{mark}', 'w'))()",
    ]
    for payload in payloads:
        for text in (
            payload,
            f"\\boxed{{{payload}}}",
            f"The answer is {payload}",
            f"#### {payload}",
            f"\\boxed{{\\text{{{payload}}}}}",
        ):
            assert score(text, "5") == 0.0
        assert not mark.exists()
        eval(payload)
        assert mark.exists()
        mark.unlink()


def work(seconds: float) -> None:
    """So much CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_endless_work_is_interrupted_even_where_errors_are_caught() -> None:
    before = signal.getsignal(signal.SIGPROF)
    with pytest.raises(OutOfCpuTime), cpu_limit(0.02):
        while True:
            with suppress(Exception):  # as libraries do
                work(0.001)
    assert signal.getsignal(signal.SIGPROF) == before


def test_time_in_which_others_have_the_core_does_not_count() -> None:
    with cpu_limit(0.2):
        time.sleep(0.3)


def test_afterwards_there_is_no_limit() -> None:
    with cpu_limit(0.2):
        pass
    work(0.3)


def test_another_timer_is_left_alone() -> None:
    """That of a child which ends itself when nobody does."""
    signal.setitimer(signal.ITIMER_REAL, 3600)
    try:
        with cpu_limit(1.0):
            pass
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_other_threads_have_none() -> None:
    ended: list[bool] = []

    def run() -> None:
        with cpu_limit(0.01):
            work(0.03)
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended
