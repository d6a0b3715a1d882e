"""Supervised fine-tuning with packed rows and micro-batches by tokens is training row by row, on 1 and 2 real ranks."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from tests.integration import sft_checks as checks
from tests.integration.fsdp_ranks import Ranks
from tests.support.chat_model import save_chat_model

STEPS = [list(range(6)), [6, 7, 8], list(range(2, 9))]  # the second has fewer rows on one of two ranks
BY_TOKENS = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 220}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packed, by tokens": (BY_TOKENS, {"use_remove_padding": True}),
    "packed, whole": ({}, {"use_remove_padding": True}),
    "padded, by tokens": (BY_TOKENS, {"use_remove_padding": False}),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_chat_model(tmp_path_factory.mktemp("sft") / "model"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations of one to three turns, from a few tokens to hundreds."""
    draw = random.Random(3)
    rows = []
    for row in range(9):
        messages = []
        for _ in range(1 + row % 3):
            for role in ("user", "assistant"):
                messages.append({"role": role, "content": "".join(draw.choices("abc 0123", k=draw.randint(1, 50)))})
        rows.append({"messages": messages})
    path = tmp_path_factory.mktemp("sft_rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def expected(model: str, file: str) -> dict[str, Any]:
    return checks.row_by_row(model, file, STEPS)


@pytest.fixture(scope="module", params=(1, 2), ids=lambda world: f"world{world}")
def ranks(request: pytest.FixtureRequest):
    group = Ranks(request.param)
    yield group
    group.close()


def distance(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest difference of losses, gradient norms and weights."""
    assert found["weights"].keys() == expected["weights"].keys()
    pairs = [(found[name], expected[name]) for name in ("losses", "norms")]
    pairs += [(found["weights"][name], expected["weights"][name]) for name in expected["weights"]]
    return max(float(np.abs(np.asarray(ours) - np.asarray(theirs)).max()) for ours, theirs in pairs)


@pytest.mark.parametrize("case", CASES)
def test_packed_training_is_row_by_row_training(ranks: Ranks, model: str, file: str, expected: dict[str, Any], case: str) -> None:
    data, settings = CASES[case]
    for found in ranks.call(checks.train, model, file, STEPS, data, settings):
        assert distance(found, expected) < 1e-9


def test_the_comparison_sees_learning_from_others_tokens(model: str, file: str, expected: dict[str, Any]) -> None:
    """The control: with the loss on every token, losses and weights are far away."""
    assert distance(checks.row_by_row(model, file, STEPS, learn_all=True), expected) > 1e-3
