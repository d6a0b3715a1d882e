import re
from typing import Any

import pytest

from rlhub.rewards.pool import RewardOutcome, read_outcome
from rlhub.utils.children.pool import CallResult, Failure


@pytest.mark.parametrize(
    ("value", "score", "details"),
    [
        (1, 1.0, {}),
        (-0.5, -0.5, {}),
        (True, 1.0, {}),
        (False, 0.0, {}),
        ({"score": 2, "acc": True}, 2.0, {"acc": True}),
        (-3.0e38, -3.0e38, {}),
    ],
)
def test_numbers_booleans_and_dicts_with_a_score(value: Any, score: float, details: dict[str, Any]) -> None:
    assert read_outcome(CallResult(value=value)) == RewardOutcome(score=score, details=details)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "None"),
        ("1.0", "str '1.0'"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (1e39, "1e\\+39"),
        (10**60, "integer beyond"),
        ([1.0], "list \\[1.0\\]"),
        ({"acc": 1.0}, "without \"score\".*'acc'"),
        ({"score": None}, "None"),
        ({"score": float("nan"), "acc": 1}, "nan"),
    ],
)
def test_anything_else_is_a_bad_value(value: Any, says: str) -> None:
    outcome = read_outcome(CallResult(value=value))
    assert outcome.score == 0.0 and outcome.error is not None and outcome.error.kind == "bad_value"
    assert re.search(says, outcome.error.message)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("raised", "raised"),
        ("timeout", "timeout"),
        ("died", "died"),
        ("memory", "memory"),
        ("bad_argument", "bad_input"),
        ("bad_result", "bad_value"),
    ],
)
def test_failures_of_the_pool_keep_their_kind(kind: Any, expected: str) -> None:
    outcome = read_outcome(CallResult(failure=Failure(kind=kind, message="why")))
    assert outcome.error is not None and (outcome.error.kind, outcome.error.message) == (expected, "why")
