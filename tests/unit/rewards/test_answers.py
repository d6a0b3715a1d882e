"""The scorers gsm8k and exact: an answer counts where it is stated, and only there."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhub.rewards.answers import compute_score


def score(text: str, truth: object) -> float:
    return compute_score("openai/gsm8k", text, truth, None)


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("48/2 = 24, 48+24 = 72\n#### 72", "72"),
        ("#### 1,234", "1234"),
        ("####1234", "1,234"),
        ("So the total is \\boxed{72}.", "72"),
        ("\\boxed{\\text{72 clips}}", "72"),
        ("\\boxed{\\$1{,}234}", "1234"),
        ("\\boxed{\\frac{6}{2}}", "3"),
        ("\\boxed{x = 72}", "72"),
        ("\\boxed{10\\%}", "10"),
        ("The answer is 1,234.", "1234"),
        ("the answer is: $18.", "18"),
        ("The final answer is **72**.", "72"),
        ("**Answer:** 72", "72"),
        ("Answer: 24 + 48 = 72.", "72"),
        ("The answer is 3.0", "3"),
        ("The answer is 50%.", 50),
        ("The answer is \u22125 degrees", -5),
        ("The answer is $-5", "-5"),
        ("The answer is 72. To check, 72 - 24 = 48.", "72"),
        ("#### 71\nWait, no.\n#### 72", "72"),
        ("#### 2. Add up\n24+48. The answer is 72.", "72"),
        ("The answer is 7. Hmm, so \\boxed{72}", "72"),
        ("72", "72"),
        ("$72.", "72"),
        ("#### 72", "24 + 48 = 72\n#### 72"),
    ],
)
def test_a_right_stated_answer_scores_one(text: str, truth: object) -> None:
    assert score(text, truth) == 1.0


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        ("", "72"),
        ("48+24 = 72 clips", "72"),
        ("she has 72 left, then buys one\n#### 73", "72"),
        ("\\boxed{72} and then \\boxed{73}", "72"),
        ("The answer is 72. No: the answer is 73.", "72"),
        ("#### 72 or 73", "72"),
        ("\\boxed{72, 73}", "72"),
        ("The answer is 72 + 1", "72"),
        ("The answer is 72 + 1 = 73", "72"),
        ("The answer is not 72", "72"),
        ("#### 1. 72 clips are needed", "1"),
        ("#### 72.5", "72"),
        ("#### 721", "72"),
        ("#### 7,2", "72"),
        ("#### 72e3", "72"),
        ("#### 1/0", "1"),
        ("\\boxed{72", "72"),
        ("\\boxed{}", "72"),
        ("72 73", "72"),
        ("####", "72"),
        ("#### " + "9" * 5000, "9"),
        ("#### __import__('os')", "72"),
    ],
)
def test_anything_else_scores_zero(text: str, truth: object) -> None:
    assert score(text, truth) == 0.0


@given(
    st.integers(-(10**12), 10**12),
    st.sampled_from(["#### {}", "\\boxed{{{}}}", "the answer is {}.", "Answer: ${}", "{}"]),
    st.booleans(),
)
def test_every_integer_in_every_form(value: int, form: str, grouped: bool) -> None:
    text = form.format(f"{value:,}" if grouped else value)
    assert score(text, str(value)) == 1.0
    assert score(text, str(value + 1)) == 0.0


@given(st.text(alphabet=st.sampled_from(list("0123456789.,$%#\\{}boxed answer is=:-+/\n\u0661\U0001d7ce\ud800")), max_size=200))
def test_no_text_breaks_it(text: str) -> None:
    assert score(text, "7") in (0.0, 1.0)


@pytest.mark.parametrize("piece", ["####", "\\boxed{", "answer is ", "1,111,", "{", "answer ", "1+", "#### 1. a\n", " ", "$"])
def test_long_odd_texts_are_read_in_linear_time(piece: str) -> None:
    """A quadratic search of half a million characters would not end within the suite's time."""
    assert score(piece * (500_000 // len(piece)), "7") == 0.0


@pytest.mark.parametrize("truth", ["", "seventy", None, "#### ", "1,2"])
def test_a_ground_truth_that_is_no_number_is_an_error(truth: object) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        score("#### 1", truth)


if "RLHUB_GSM8K_DIR" in os.environ:  # the published data set is not part of the project

    def test_the_published_answers() -> None:
        lines = (Path(os.environ["RLHUB_GSM8K_DIR"]) / "test.jsonl").read_text().splitlines()
        answers = [json.loads(line)["answer"] for line in lines]
        assert len(answers) == 1319
        for answer in answers:
            working, truth = answer.rsplit("####", 1)
            wrong = f"{int(truth.replace(',', '')) + 1:,}"
            for right in (answer, f"{working}The answer is {truth.strip()}.", f"\\boxed{{{truth.strip()}}}"):
                assert score(right, truth) == 1.0, right
            for text in (f"{working}\n#### {wrong}", f"{working}The answer is {wrong}.", f"{working}\\boxed{{{wrong}}}"):
                assert score(text, truth) == 0.0, text
