"""Outcomes on their way between processes, and scoring in the background."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhub.rewards import RewardFailure, RewardOutcome, RewardRequest
from rlhub.rewards.pool import RewardFunction
from rlhub.rewards.rows import BackgroundScorer, pack_outcomes, rows_here, score_rows, unpack_outcomes
from tests.unit.rewards.test_managers import Letters, Scripted, make_batch

FAILED = RewardOutcome(error=RewardFailure(kind="raised", message="why"))
VALUES = st.one_of(st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.none(), st.lists(st.integers()))
OUTCOMES = st.one_of(
    st.just(FAILED),
    st.builds(
        lambda score, details: RewardOutcome(score=score, details=details),
        st.floats(allow_nan=False),
        st.dictionaries(st.sampled_from(["acc", "n", "why"]), VALUES),
    ),
)


@given(st.lists(OUTCOMES, max_size=6))
def test_outcomes_survive_the_way_with_the_types_of_their_numbers(outcomes: list[RewardOutcome]) -> None:
    found = unpack_outcomes(pickle.loads(pickle.dumps(pack_outcomes(outcomes))))
    assert found == outcomes
    kinds = [{name: type(value) for name, value in one.details.items()} for one in found]
    assert kinds == [{name: type(value) for name, value in one.details.items()} for one in outcomes]


def test_a_row_is_a_few_bytes() -> None:
    outcomes = [RewardOutcome(score=row / 7, details={"acc": row % 2 == 0, "n": row}) for row in range(1000)]
    assert len(pickle.dumps(pack_outcomes(outcomes), protocol=5)) < 18 * len(outcomes)
    assert len(pickle.dumps(outcomes, protocol=5)) > 30 * len(outcomes)


def test_rows_are_scored_with_the_fields_of_their_prompts() -> None:
    pool: Any = Scripted({"a": 1.0, "b": 2.0})
    batch = make_batch(["a", "b", "a"])
    assert [one.score for one in score_rows(batch, Letters(), pool, 0)] == [1.0, 2.0, 1.0]
    assert [one.score for one in score_rows(batch, Letters(), pool, 0, [1])] == [2.0]
    assert [(one.solution_str, one.ground_truth, one.extra_info) for one in pool.seen] == [("b", "truth 1", {"i": 1})]
    assert score_rows(batch, Letters(), pool, 0, []) == []


def test_rows_of_a_batch_are_as_they_were_when_they_were_brought() -> None:
    batch = make_batch(["a", "b"])
    here = rows_here(batch)
    batch.reorder(np.array([1, 0]))
    assert here.non_tensor_batch["ground_truth"].tolist() == ["truth 0", "truth 1"]


class Gated(Scripted):
    """Waits before it scores, until it is let go."""

    def __init__(self, table: dict[str, Any]) -> None:
        super().__init__(table)
        self.begun, self.go, self.closed = threading.Event(), threading.Event(), False

    def score(self, requests: Sequence[RewardRequest], *, max_failures: int | None = None) -> list[RewardOutcome]:
        self.begun.set()
        assert self.go.wait(60)
        return super().score(requests, max_failures=max_failures)

    def close(self) -> None:
        self.closed = True


def test_scoring_goes_on_in_the_background_until_its_outcomes_are_taken() -> None:
    pool: Any = Gated({"a": 1.0, "b": 2.0})
    scorer = BackgroundScorer(pool, Letters())
    scorer.begin("samples", make_batch(["a", "b"]), 0)
    scorer.begin("greedy", make_batch(["b"]), 0)
    assert pool.begun.wait(60) and not pool.go.is_set(), "both returned while the first was at work"
    pool.go.set()
    assert [[one.score for one in unpack_outcomes(scorer.take(key))] for key in ("greedy", "samples")] == [[2.0], [1.0, 2.0]]
    scorer.close()
    assert pool.closed


def test_an_error_of_the_scoring_is_raised_where_its_outcomes_are_taken() -> None:
    scorer = BackgroundScorer(Scripted({}), Letters())  # type: ignore[arg-type]
    batch = make_batch(["a"])
    del batch.non_tensor_batch["ground_truth"]
    scorer.begin("samples", batch, 0)
    with pytest.raises(KeyError, match="ground_truth"):
        scorer.take("samples")
    scorer.close()


class LettersLater(Letters):
    """Decodes when it is let go.  asked: it has been asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def batch_decode(self, *args: Any, **kwargs: Any) -> list[str]:
        self.asked.set()
        assert self.go.wait(60)
        return super().batch_decode(*args, **kwargs)


@pytest.mark.parametrize("begun", [True, False])
def test_closing_does_not_wait_for_a_function_that_hangs(tmp_path: Path, begun: bool) -> None:
    """Whether its processes are at work, or the batch has not come to them yet."""
    source, at_work = tmp_path / "hangs.py", tmp_path / "at work"
    parameters = "data_source, solution_str, ground_truth, extra_info"
    source.write_text(
        f"import time\ndef compute_score({parameters}):\n    open({str(at_work)!r}, 'w').close()\n    time.sleep(600)\n"
    )
    pool = RewardFunction(target=f"{source}:compute_score", num_workers=1, timeout_s=300.0).pool()
    letters = LettersLater()
    scorer = BackgroundScorer(pool, letters)
    pool.start()
    scorer.begin("samples", make_batch(["a", "b"]), 2)
    assert letters.asked.wait(60)
    if begun:
        letters.go.set()
        while not at_work.exists():
            time.sleep(0.01)
    closed = threading.Thread(target=scorer.close)
    closed.start()
    closed.join(60)
    assert not closed.is_alive()
    letters.go.set()
    assert [one.error and one.error.kind for one in unpack_outcomes(scorer.take("samples"))] == ["skipped", "skipped"]


@pytest.mark.parametrize(("total", "ranks", "expected"), [(4, 2, [2, 2]), (5, 2, [3, 2]), (1, 3, [1, 1, 1]), (3, 8, [1] * 8)])
def test_a_machines_processes_are_shared_out_over_its_ranks(total: int, ranks: int, expected: list[int]) -> None:
    function = RewardFunction(target="rlhub.rewards.registry:compute_score", num_workers=total)
    assert [function.pool(share, ranks)._pool.num_workers for share in range(ranks)] == expected
