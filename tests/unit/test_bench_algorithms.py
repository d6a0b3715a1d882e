"""The learning bench tells runs that learned from runs that did not, and leaves no registered part out."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from scripts.bench import algorithms as bench


def write(folder: Path, accuracy: list[float], **more: Any) -> None:
    rows = [{"step": step, bench.ACCURACY: value, "actor/pg_clipfrac": 0.25, **more} for step, value in enumerate(accuracy)]
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("accuracy", "more", "said"),
    [
        ([0.37, 0.6, 0.8], {}, []),
        ([0.37, 0.80, 0.73], {}, []),
        ([0.37, 0.32, 0.26], {}, ["gain -0.110", "last 0.70 of best"]),  # shuffled rewards
        ([0.37, 0.40, 0.46], {}, ["gain +0.090"]),
        ([0.37, 0.9, 0.8], {}, ["last 0.89 of best"]),
        ([0.37, 0.6, 0.8], {"actor/pg_loss": None}, ["not finite: actor/pg_loss"]),
        ([0.37, 0.6, 0.8], {"actor/pg_loss": math.nan}, ["not finite: actor/pg_loss"]),
        ([0.37, 0.6, 0.8], {"actor/skipped_steps": 1.0}, ["3 steps skipped"]),
        ([0.37], {}, ["no validation"]),
    ],
)
def test_the_verdict(tmp_path: Path, accuracy: list[float], more: dict[str, Any], said: list[str]) -> None:
    write(tmp_path, accuracy, **more)
    found = bench.figures(tmp_path, 1.0)
    assert found.problems == said and found.accuracy == accuracy
    assert found.clip_fraction == 0.25 and math.isnan(found.kl)


def test_every_registered_part_is_run() -> None:
    found = list(bench.subjects([]))
    on_prompts = [name for name in ADVANTAGE_ESTIMATORS.names() if "episodes" not in ADVANTAGE_ESTIMATORS.row(name).requires]
    assert [subject.name for subject in found if subject.kind == "estimator"] == on_prompts
    assert [subject.name for subject in found if subject.kind == "loss"] == POLICY_LOSSES.names()
    assert len({subject.label for subject in found}) == len(found)
    assert [subject.label for subject in bench.subjects(["loss-gpg"])] == ["loss-gpg"]
    assert {subject.label for subject in bench.subjects(["gpg"])} == {"estimator-gpg", "loss-gpg"}
