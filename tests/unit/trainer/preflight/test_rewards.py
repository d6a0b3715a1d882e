"""Faults of learned rewards that are found before any process starts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhub.config.sections.ppo import PPOConfig
from tests.unit.trainer.preflight.test_checks import MODEL, own_folder, problems

__all__ = ["own_folder"]  # the fixture


def save(name: str, **values: Any) -> str:
    Path(name).mkdir()
    (Path(name) / "config.json").write_text(json.dumps(MODEL | values))
    return name


def with_model(path: str | None, **settings: Any) -> Callable[[PPOConfig], object]:
    def change(config: PPOConfig) -> None:
        config.reward_model.enable, config.reward_model.model.path = True, path
        for name, value in settings.items():
            setattr(config.reward_model.model, name, value)

    return change


def with_judge(**settings: Any) -> Callable[[PPOConfig], object]:
    def change(config: PPOConfig) -> None:
        judge = config.reward_model.judge
        judge.model.path, judge.max_prompt_length, judge.max_tokens = "model", 128, 128
        for name, value in settings.items():
            setattr(judge, name, value)

    return change


def test_sound_models_pass() -> None:
    one = save("one", architectures=["Qwen2ForSequenceClassification"], id2label={"0": "LABEL_0"})
    assert problems(with_model(one)) == []
    assert problems(with_model("some/hub-name")) == []
    assert problems(with_model(one, input_tokenizer="model")) == []
    assert problems(with_judge()) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"architectures": ["Qwen2ForTokenClassification"]}, "holds Qwen2ForTokenClassification: a reward model is"),
        ({"architectures": ["BertModel"]}, "holds BertModel"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "classifier with 2 labels"),
        ({"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "a", "1": "b", "2": "c"}}, "3 labels"),
    ],
)
def test_what_is_no_reward_model(values: dict[str, Any], said: str) -> None:
    (problem,) = problems(with_model(save("other", **values)))
    assert problem.startswith("reward_model.model.path: 'other'") and said in problem


def test_a_language_model_gets_a_new_head_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert problems(with_model(save("lm", architectures=["Qwen2ForCausalLM"]))) == []
    assert "without a reward head: its scores come from random weights" in caplog.text


def test_missing_folders() -> None:
    (problem,) = problems(with_model("./nowhere"))
    assert problem.startswith("reward_model.model.path=./nowhere: no such folder")
    one = save("one", architectures=["Qwen2ForSequenceClassification"], id2label={"0": "LABEL_0"})
    (problem,) = problems(with_model(one, input_tokenizer="./nowhere"))
    assert problem.startswith("reward_model.model.input_tokenizer=./nowhere: no such folder")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"prompt_template": "{question}"}, "reward_model.judge.prompt_template has no {response}"),
        ({"prompt_template": "{response} {x}"}, "{x} is no place"),
        ({"score_pattern": "["}, "is no regular expression"),
        ({"name": "hff"}, "reward_model.judge.name"),
        ({"max_tokens": 1000}, "128 + reward_model.judge.max_tokens=1000 = 1128 tokens, but reward_model.judge.model has 1024"),
    ],
)
def test_what_is_wrong_with_a_judge(settings: dict[str, Any], said: str) -> None:
    (problem,) = problems(with_judge(**settings))
    assert said in problem


def test_a_judge_that_is_not_there() -> None:
    def change(config: PPOConfig) -> None:
        config.reward_model.judge.model.path = "./nowhere"

    (problem,) = problems(change)
    assert problem.startswith("reward_model.judge.model.path=./nowhere: no such folder")
