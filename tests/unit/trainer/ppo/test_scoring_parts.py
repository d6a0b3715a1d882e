"""Putting the reward together: which parts there are, and which tokenizers fit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError, RewardError
from rlhub.models.tokenizer import load_tokenizer
from rlhub.protocol import DataProto
from rlhub.rewards import RewardOutcome
from rlhub.rewards.combine import NUMBER, CombinedManager, Judgements
from rlhub.rewards.managers import DapoKnobs, DapoManager, NaiveManager
from rlhub.rewards.rows import PackedOutcomes, pack_outcomes, score_rows
from rlhub.trainer.ppo.scoring import (
    JudgeScorer,
    ModelScorer,
    RewardParts,
    RowsOnRanks,
    check_tokens,
    prepare_reward,
    reward_roles,
)
from rlhub.workers.memory_handover import WorkerRuntime
from scripts.bench.tiny_model import build as build_words
from tests.support.chat_model import save_chat_model
from tests.unit.rewards.test_combine_judge import batch_of
from tests.unit.rewards.test_managers import Letters, Scripted, make_batch, parts

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


def check(config: PPOConfig) -> None:
    check_tokens(config, load_tokenizer(config.actor_rollout_ref.model.path))


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
    assert RewardParts(config=config, function=function).manager({}) is function
    config.reward_model.function_weight = 0.5
    assert isinstance(RewardParts(config=config, function=function).manager({}), CombinedManager)


def test_a_weight_of_zero_starts_no_reward_process(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: Any) -> Any:
        raise AssertionError("a reward process")

    monkeypatch.setattr("rlhub.trainer.ppo.scoring.build_reward_manager", started)
    config = config_for(folders["words"], folders["words"])
    tokenizer = load_tokenizer(str(folders["words"]))
    with pytest.raises(AssertionError, match="a reward process"):
        prepare_reward(config, tokenizer)
    config.reward_model.function_weight = 0.0
    prepared = prepare_reward(config, tokenizer)
    assert prepared.function is None
    manager = prepared.manager({"reward_model": None})  # type: ignore[dict-item]
    assert isinstance(manager, CombinedManager) and [part.name for part in manager.parts] == ["model"]
    prepared.close()


def test_one_vocabulary_feeds_tokens_as_they_are(folders: dict[str, Path]) -> None:
    check(config_for(folders["words"], folders["words"]))


def test_another_vocabulary_is_refused_unless_texts_are_rendered_anew(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"another vocabulary \(\d+ tokens\) than the policy \(32\).*input_tokenizer=.*words"):
        check(config_for(folders["words"], folders["letters"]))
    check(config_for(folders["words"], folders["letters"], input_tokenizer=str(folders["words"])))


def test_an_input_tokenizer_must_be_the_policys(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"input_tokenizer=.*letters has another vocabulary than the policy"):
        check(config_for(folders["words"], folders["letters"], input_tokenizer=str(folders["letters"])))


def test_another_chat_template_is_said(folders: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = save_chat_model(tmp_path / "other")
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        path = other / file
        if path.is_file():
            path.write_text(path.read_text().replace("assistant: ", "you: "))
    with caplog.at_level(logging.WARNING):
        check(config_for(folders["letters"], other))
    assert "another chat template" in caplog.text
    caplog.clear()
    check(config_for(folders["letters"], folders["letters"]))
    assert caplog.text == ""


def test_token_ids_beyond_the_embeddings_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    small = tmp_path / "small"
    build_words(small, hidden=16, layers=1, vocab_size=32)
    values = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(values | {"vocab_size": 31}))
    with pytest.raises(ConfigError, match="31 embeddings, but the tokenizer it reads has token ids up to 31"):
        check(config_for(folders["words"], small))


class Sent:
    """A submitted method of a group, which remembers what it was given."""

    def __init__(self, method: Callable[[DataProto], Any]) -> None:
        self.method, self.asked = method, DataProto()

    def submit(self, batch: DataProto) -> SimpleNamespace:
        self.asked = batch
        return SimpleNamespace(get=lambda: self.method(batch))


def sampled() -> DataProto:
    batch = batch_of(["ab", "c"])
    batch.batch["input_ids"], batch.batch["ordinal"] = torch.tensor([[4, 5], [6, 7]]), torch.tensor([3, 3])
    batch.batch["attention_mask"] = batch.batch["attention_mask"][:, :2]
    return batch


@pytest.mark.parametrize(
    ("renders", "tensors", "arrays"),
    [(False, {"input_ids", "attention_mask"}, set()), (True, {"responses", "response_length"}, {"raw_chat"})],
)
def test_a_reward_model_is_given_only_what_it_reads(renders: bool, tensors: set[str], arrays: set[str]) -> None:
    sent = Sent(lambda batch: DataProto.from_dict({"rm_scores": torch.tensor([4.0, float("nan")])}))
    group: Any = SimpleNamespace(compute_rm_score=sent)
    found = ModelScorer(group=group, renders=renders)(sampled())()
    assert set(sent.asked.batch.keys()) == tensors and set(sent.asked.non_tensor_batch) == arrays
    assert found.outcomes[0].score == 4.0 and found.outcomes[1].error is not None


def test_a_judge_is_given_rows_with_the_numbers_of_their_noise() -> None:
    """Both samples of a prompt; the judgements of two parts of the rows are one part of the reward."""
    parts = [Judgements(pack_outcomes([RewardOutcome(score=score)]), 3, read) for score, read in ((7.0, 3), (5.0, 1))]
    sent = Sent(lambda batch: parts)
    found = JudgeScorer(group=SimpleNamespace(generate_judgements=sent))(sampled())()  # type: ignore[arg-type]
    assert set(sent.asked.batch.keys()) == {"responses", "response_length", NUMBER}
    assert sent.asked.batch[NUMBER].tolist() == [3 << 12, (3 << 12) + 1]
    assert set(sent.asked.non_tensor_batch) == {"raw_chat", "ground_truth"}
    assert [one.score for one in found.outcomes] == [7.0, 5.0]
    assert found.metrics == {"reward/judge_num_unreadable": 2.0, "reward/judge_unreadable_share": 2 / 6}


class RankGroup:
    """The rollout's ranks, each with half of the rows, scored by a table."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table, self.begun = table, {}  # type: ignore[var-annotated]

    def methods(self) -> list[str]:
        return ["begin_scoring", "take_outcomes"]

    def begin_scoring(self, batch: DataProto, key: str, max_failures: int) -> None:
        assert set(batch.batch.keys()) == {"responses", "response_length"}
        assert set(batch.non_tensor_batch) == {"data_source", "ground_truth", "extra_info"}
        self.begun[key] = [score_rows(part, Letters(), Scripted(self.table), max_failures) for part in batch.chunk(2)]  # type: ignore[arg-type]

    def take_outcomes(self, key: str) -> list[PackedOutcomes]:
        return [pack_outcomes(part) for part in self.begun.pop(key)]


TABLE: dict[str, Any] = {"a": 1.0, "abcde": {"score": 0.5, "n": 3}, "abcdef": 1.0}
TEXTS = ["a", "abcde", "abcdef", "xxxxxx", "a"]
DAPO = DapoKnobs(overlong_buffer_cfg={"enable": True, "len": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize("manager", [NaiveManager(parts(TABLE)), DapoManager(parts(TABLE), DAPO)])
def test_rows_scored_on_the_ranks_have_the_rewards_of_rows_scored_here(manager: NaiveManager) -> None:
    """Control: outcomes that come back in another order are other rewards."""
    here, group = manager(make_batch(TEXTS)), RankGroup(TABLE)
    there = RowsOnRanks(manager, group)(make_batch(TEXTS))  # type: ignore[arg-type]
    assert torch.equal(there.scores, here.scores) and torch.equal(there.valid, here.valid) and there.metrics == here.metrics
    assert {name: column.tolist() for name, column in there.extra.items()} == {
        name: column.tolist() for name, column in here.extra.items()
    }
    take = group.take_outcomes
    group.take_outcomes = lambda key: take(key)[::-1]  # type: ignore[method-assign]
    shuffled = RowsOnRanks(manager, group)(make_batch(TEXTS))  # type: ignore[arg-type]
    assert not torch.equal(shuffled.scores, here.scores)


def test_the_policy_for_failures_is_the_drivers_wherever_rows_are_scored() -> None:
    manager, group = NaiveManager(parts(TABLE, max_error_rate=0.1)), RankGroup(TABLE)
    with pytest.raises(RewardError, match=r"(?s)1 of 5.*row 3, data_source 'source', 6 tokens: raised: no xxxxxx.*0.1 allows"):
        RowsOnRanks(manager, group)(make_batch(TEXTS))  # type: ignore[arg-type]


def test_rows_are_scored_on_the_ranks_where_the_manager_and_the_ranks_allow_it(folders: dict[str, Path]) -> None:
    class Calls(NaiveManager):
        def __call__(self, batch: DataProto) -> Any:
            return super().__call__(batch)

    config, ranks = config_for(folders["words"]), {"rollout": RankGroup(TABLE)}
    manager = NaiveManager(parts(TABLE))
    assert isinstance(RewardParts(config=config, function=manager).manager(ranks), RowsOnRanks)  # type: ignore[arg-type]
    assert RewardParts(config=config, function=manager).manager({}) is manager, "no ranks generate: episodes are scored here"
    calls = Calls(parts(TABLE))
    assert RewardParts(config=config, function=calls).manager(ranks) is calls  # type: ignore[arg-type]
