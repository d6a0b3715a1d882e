"""Retry with feedback."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rlhub.agents.workflows.base import build_workflow
from rlhub.errors import ConfigError
from tests.support.chatml import chatml_tokenizer
from tests.support.episode_parts import ScriptedEngine, parts, run, written


async def exact(row: Mapping[str, Any], text: str) -> tuple[float, dict[str, float]]:
    return float(text == row["ground_truth"]), {}


def again(text: str) -> str:
    return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("wrong", "reward"), [(0, 1.0), (1, 0.5), (2, 0.25), (3, 0.0)])
def test_tries_go_on_until_an_answer_is_right_and_each_costs(wrong: int, reward: float) -> None:
    workflow = build_workflow("multi_turn", parts(score=exact, feedback="No.", turn_discount=0.5))
    found = run(workflow, ScriptedEngine(replies=["5"] * wrong + ["4"]))
    turns = min(wrong + 1, 3)
    assert found.metrics["num_turns"] == turns and found.rewards is not None
    assert sum(found.rewards) == found.rewards[-1] == reward
    assert found.metrics["right_at_once"] == float(wrong == 0) and found.metrics["right_at_last"] == float(wrong < 3)
    said = ["5<|im_end|>", again("No.")] * min(wrong, 2) + [("4" if wrong < 3 else "5") + "<|im_end|>"]
    assert written(found) == said


def test_the_episode_ends_where_no_other_answer_fits() -> None:
    found = run(build_workflow("multi_turn", parts(score=exact, budget=30)), ScriptedEngine(replies=["5", "4"]))
    assert found.metrics["num_turns"] == 1 and found.rewards == [0.0, 0.0] and found.finish_reason == "length"


def test_a_template_that_rewrites_earlier_turns_is_refused() -> None:
    """Among others what counts its messages, or shows only the last of them."""
    template = "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
    broken = parts(score=exact)
    for source, message in ((template, "rewrites earlier turns"), ("{{ messages[-1].content }}", "rewrites|drops"), ("", "no")):
        broken.tokenizer = chatml_tokenizer(source)
        with pytest.raises(ConfigError, match=message):
            build_workflow("multi_turn", broken)


@pytest.mark.parametrize(
    "settings", [{"feedback": ""}, {"turn_discount": -1.0}, {"max_turn_tokens": 0}, {"max_user_turns": "2"}, {"feedbak": "x"}]
)
def test_wrong_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        build_workflow("multi_turn", parts(score=exact, **settings))
