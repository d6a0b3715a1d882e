"""rlhub's algorithms compute TRL's numbers, or differ as their docstrings say; and the comparison notices what it should.

Here rather than among the unit tests because TRL's trainers take 10 s to import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rlhub.algorithms import statistics
from rlhub.algorithms.policy_losses import vanilla
from rlhub.algorithms.preference import PreferenceInputs

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with mock.patch.dict(os.environ), mock.patch.object(sys, "path", [str(BENCH), *sys.path]):
        import algorithm_trl  # which sets variables, vLLM's log level among them

        yield algorithm_trl


def failed(bench: Any, dtype: torch.dtype = torch.float64) -> set[tuple[str, str]]:
    return {(case.mine, case.theirs) for case in bench.cases(dtype) if not bench.good(case, bench.distance(case), dtype)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_numbers_agree_or_a_docstring_says_why(bench: Any, dtype: torch.dtype) -> None:
    assert len(bench.cases(dtype)) >= 45
    assert failed(bench, dtype) == set()


def test_a_shifted_clip_is_noticed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = vanilla.bounds
    monkeypatch.setattr(vanilla, "bounds", lambda *given: (right(*given)[0], right(*given)[1] + 0.01))
    clipped = {(case.mine, case.theirs) for case in bench.clipped_losses(torch.float64) if case.differs is None}
    assert failed(bench) == clipped


def test_a_flipped_sign_is_noticed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PreferenceInputs.margin.fget
    assert right is not None
    monkeypatch.setattr(PreferenceInputs, "margin", property(lambda self: -right(self)))
    assert {mine for mine, _ in failed(bench)} == {
        "DPO sigmoid",
        "DPO sigmoid, label_smoothing",
        "DPO hinge",
        "IPO, given means over tokens",
    }


def test_another_baseline_is_noticed(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = statistics.GroupStatistics.centred
    monkeypatch.setattr(statistics.GroupStatistics, "centred", lambda self, rewards: 1.001 * right(self, rewards))
    assert {mine for mine, _ in failed(bench)} == {
        "grpo, 1e-4 added",
        "grpo without std",
        "rloo",
        "rloo, KL k1 in the reward",
    }


def test_a_difference_needs_its_words_and_words_their_difference(bench: Any) -> None:
    different = next(case for case in bench.cases() if case.differs)
    assert bench.good(different, 0.5)
    assert not bench.good(different, 0.0)
    different.differs = (different.differs[0], "words that no docstring has")
    assert not bench.good(different, 0.5)
    different.differs = None
    assert not bench.good(different, 0.5)
