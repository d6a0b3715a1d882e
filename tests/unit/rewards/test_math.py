import pathlib
import time
from typing import Any

import pytest
from math_verify import parse

from rlhub.rewards.math import compute_score


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
