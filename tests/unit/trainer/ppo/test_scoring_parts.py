"""Putting the reward together: which parts there are, and which tokenizers fit."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError
from rlhub.models.tokenizer import load_tokenizer
from rlhub.protocol import DataProto
from rlhub.rewards.combine import CombinedManager
from rlhub.trainer.ppo.scoring import JudgeGenerator, ModelScorer, RewardParts, build_rendering, prepare_reward, reward_roles
from rlhub.workers.memory_handover import WorkerRuntime
from scripts.bench.tiny_model import build as build_words
from tests.support.chat_model import save_chat_model
from tests.unit.rewards.test_combine_judge import batch_of

RUNTIME = WorkerRuntime(device="cpu", seed=0, max_prompt_length=4, max_response_length=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    build_words(folder / "words", hidden=16, layers=1, vocab_size=32)
    return {"words": folder / "words", "letters": save_chat_model(folder / "letters", max_positions=64)}


def config_for(policy: Path, reward: Path | None = None, **model: Any) -> PPOConfig:
    config = PPOConfig()
    config.actor_rollout_ref.model.path = str(policy)
    if reward is not None:
        config.reward_model.enable, config.reward_model.model.path = True, str(reward)
    for name, value in model.items():
        setattr(config.reward_model.model, name, value)
    return config


def rendering(config: PPOConfig) -> Any:
    return build_rendering(config, load_tokenizer(config.actor_rollout_ref.model.path))


def test_roles_are_those_that_are_on(folders: dict[str, Path]) -> None:
    assert reward_roles(config_for(folders["words"]), RUNTIME) == {}
    config = config_for(folders["words"], folders["words"])
    assert list(reward_roles(config, RUNTIME)) == ["reward_model"]
    config.reward_model.judge.model.path = str(folders["letters"])
    assert list(reward_roles(config, RUNTIME)) == ["reward_model", "judge"]


def test_a_function_alone_keeps_its_own_manager(folders: dict[str, Path]) -> None:
    class Function:
        def close(self) -> None: ...

    function: Any = Function()
    config = config_for(folders["words"])
    assert RewardParts(config=config, tokenizer=None, function=function).manager({}) is function
    config.reward_model.function_weight = 0.5
    assert isinstance(RewardParts(config=config, tokenizer=None, function=function).manager({}), CombinedManager)


def test_a_weight_of_zero_starts_no_reward_process(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: Any) -> Any:
        raise AssertionError("a reward process")

    monkeypatch.setattr("rlhub.trainer.ppo.scoring.build_reward_manager", started)
    config = config_for(folders["words"], folders["words"])
    tokenizer = load_tokenizer(str(folders["words"]))
    with pytest.raises(AssertionError, match="a reward process"):
        prepare_reward(config, tokenizer)
    config.reward_model.function_weight = 0.0
    parts = prepare_reward(config, tokenizer)
    assert parts.function is None and parts.rendering is None
    manager = parts.manager({"reward_model": None})  # type: ignore[dict-item]
    assert isinstance(manager, CombinedManager) and [part.name for part in manager.parts] == ["model"]
    parts.close()


def test_one_vocabulary_feeds_tokens_as_they_are(folders: dict[str, Path]) -> None:
    assert rendering(config_for(folders["words"], folders["words"])) is None


def test_another_vocabulary_is_refused_unless_texts_are_rendered_anew(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"another vocabulary \(\d+ tokens\) than the policy \(32\).*input_tokenizer=.*words"):
        rendering(config_for(folders["words"], folders["letters"]))
    anew = rendering(config_for(folders["words"], folders["letters"], input_tokenizer=str(folders["words"])))
    assert anew is not None and anew.max_length == 64  # the reward model's positions


def test_an_input_tokenizer_must_be_the_policys(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"input_tokenizer=.*letters has another vocabulary than the policy"):
        rendering(config_for(folders["words"], folders["letters"], input_tokenizer=str(folders["letters"])))


def test_another_chat_template_is_said(folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = save_chat_model(tmp_path / "other")
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        path = other / file
        if path.is_file():
            path.write_text(path.read_text().replace("assistant: ", "you: "))
    with caplog.at_level(logging.WARNING):
        assert rendering(config_for(folders["letters"], other)) is None
    assert "another chat template" in caplog.text
    caplog.clear()
    rendering(config_for(folders["letters"], folders["letters"]))
    assert caplog.text == ""


def test_token_ids_beyond_the_embeddings_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    small = tmp_path / "small"
    build_words(small, hidden=16, layers=1, vocab_size=32)
    values = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(values | {"vocab_size": 31}))
    with pytest.raises(ConfigError, match="31 embeddings, but the tokenizer it reads has token ids up to 31"):
        rendering(config_for(folders["words"], small))


class Group:
    """A worker group that scores by the first token and answers with two samples a prompt."""

    def __init__(self) -> None:
        self.compute_rm_score = SimpleNamespace(submit=self._scored)

    def _scored(self, batch: DataProto) -> SimpleNamespace:
        assert sorted(batch.batch.keys()) == ["attention_mask", "input_ids"] and not batch.non_tensor_batch
        return SimpleNamespace(get=lambda: DataProto.from_dict({"rm_scores": batch.batch["input_ids"][:, 0].float()}))

    def generate_judgements(self, batch: DataProto) -> DataProto:
        first = batch.batch["prompts"][:, -1]
        answers = torch.stack([first, batch.batch["ordinal"], first], 1).repeat_interleave(2, 0)
        return DataProto.from_dict({"responses": answers, "response_length": torch.tensor([1, 2] * len(batch))})


def test_scorers_hand_over_only_what_is_read() -> None:
    batch = batch_of(["ab", "c"])
    batch.batch["input_ids"] = torch.tensor([[4, 5], [6, 7]])
    batch.batch["attention_mask"] = batch.batch["attention_mask"][:, :2]
    found = ModelScorer(Group(), None)(batch)()  # type: ignore[arg-type]
    assert [one.score for one in found.outcomes] == [4.0, 6.0]


async def generated(prompts: list[list[int]]) -> list[list[list[int]]]:
    return await JudgeGenerator(Group(), 2)(prompts, [10, 20])  # type: ignore[arg-type]


def test_judgements_come_back_by_prompt() -> None:
    assert asyncio.run(generated([[1, 2], [3]])) == [[[2], [2, 10]], [[3], [3, 20]]]
