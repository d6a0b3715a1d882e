"""Reward model and judge as real worker processes on two ranks, against transformers in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.config.sections.reward import JudgeConfig, JudgeModelConfig, RewardModelConfig, ScoringModelConfig
from rlhub.config.sections.trainer import DeadlineConfig
from rlhub.models.tokenizer import load_tokenizer
from rlhub.protocol import DataProto
from rlhub.rewards.combine import NUMBER, Judgements
from rlhub.rewards.rendering import padded, render
from rlhub.rewards.rows import unpack_outcomes
from rlhub.single_controller import ClassWithInitArgs, Launched, LaunchOptions, launch
from rlhub.workers.memory_handover import WorkerRuntime
from rlhub.workers.roles import JudgeWorker, RewardModelWorker
from tests.support.chat_model import save_chat_model
from tests.support.reward_models import plain_scores, save_reward_model
from tests.support.tiny_models import greedy_reference

RANKS = 2
ROWS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11], [12, 13, 14, 15], [5, 6, 7, 8]]  # one more on the first rank
NEW_TOKENS = 5
SAMPLES = 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    judge = save_chat_model(folder / "judge", seed=3)
    return {
        "judge": judge,
        "reward": save_reward_model(folder / "reward", judge),
        "flipped": save_reward_model(folder / "flipped", judge, sign=-1.0),
    }


def reward_config(path: Path, **model: Any) -> RewardModelConfig:
    scoring = ScoringModelConfig(path=str(path), **model)
    return RewardModelConfig(enable=True, strategy="fsdp2", model=scoring, micro_batch_size_per_gpu=2, use_dynamic_bsz=False)


def policy_of(folders: dict[str, Path]) -> ActorRolloutRefConfig:
    """A policy with the judge's tokenizer."""
    policy = ActorRolloutRefConfig()
    policy.model.path = str(folders["judge"])
    return policy


def texts_batch(folders: dict[str, Path], texts: list[str], numbers: list[int]) -> DataProto:
    """Rows with these responses, as a rollout gives them."""
    tokenizer = load_tokenizer(str(folders["judge"]))
    rows = padded([tokenizer(text)["input_ids"] for text in texts]).batch
    tensors = {
        "responses": rows["input_ids"],
        "response_length": rows["attention_mask"].sum(1),
        NUMBER: torch.tensor(numbers, dtype=torch.int64),
    }
    return DataProto.from_dict(tensors, {"raw_chat": ["?"] * len(texts), "ground_truth": [""] * len(texts)})


@pytest.fixture(scope="module")
def launched(ray_cluster: None, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    runtime = WorkerRuntime(device="cpu", seed=1, max_prompt_length=8, max_response_length=4, deadline_s=600.0)
    judge = JudgeConfig(
        model=JudgeModelConfig(path=str(folders["judge"])),
        n=SAMPLES,
        temperature=1.0,
        prompt_template="{response}",
        max_prompt_length=64,
        max_tokens=NEW_TOKENS,
        name="hf",
    )
    roles = {
        "reward": ClassWithInitArgs(RewardModelWorker, reward_config(folders["reward"]), runtime),
        "padded": ClassWithInitArgs(RewardModelWorker, reward_config(folders["reward"], use_remove_padding=False), runtime),
        "flipped": ClassWithInitArgs(RewardModelWorker, reward_config(folders["flipped"]), runtime),
        "judge": ClassWithInitArgs(JudgeWorker, judge, policy_of(folders), runtime),
        "texts": ClassWithInitArgs(
            RewardModelWorker, reward_config(folders["reward"], input_tokenizer=str(folders["judge"])), runtime
        ),
    }
    logs = tmp_path_factory.mktemp("logs")
    with launch(roles, LaunchOptions(ranks_per_node=RANKS, log_dir=logs, deadline_s=DeadlineConfig(start=600.0))) as run:
        for group in run.groups.values():
            group.init_model()
        yield run


def scores_of(launched: Launched, role: str, rows: list[list[int]], *, left: bool = False) -> list[float]:
    batch = padded(rows)
    if left:
        for name, column in batch.tensors().items():
            flipped = padded([row[::-1] for row in rows]).batch[name] if name == "input_ids" else column
            batch.batch[name] = flipped.flip(1)
    result = launched.groups[role].compute_rm_score(batch)
    assert list(result.batch.keys()) == ["rm_scores"] and result.batch["rm_scores"].shape == (len(rows),)
    scores: list[float] = result.batch["rm_scores"].tolist()
    return scores


@pytest.mark.parametrize("role", ["reward", "padded"])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_scores_are_those_of_single_rows(launched: Launched, folders: dict[str, Path], role: str, left: bool, count: int) -> None:
    expected = plain_scores(folders["reward"], ROWS[:count])
    assert scores_of(launched, role, ROWS[:count], left=left) == pytest.approx(expected, abs=5e-5)  # some processors need 1.2e-5
    assert count == 1 or max(expected) - min(expected) > 0.1


def test_a_flipped_head_reverses_the_rewards(launched: Launched) -> None:
    straight, flipped = scores_of(launched, "reward", ROWS), scores_of(launched, "flipped", ROWS)
    assert flipped == pytest.approx([-score for score in straight], abs=1e-6) and max(map(abs, straight)) > 0.1


@pytest.mark.parametrize("count", [1, 5])
def test_texts_are_rendered_where_the_rows_are(launched: Launched, folders: dict[str, Path], count: int) -> None:
    """Rows of unequal widths on the ranks; the second rank may have none."""
    texts = ["a", "some more words", "b", "", "two words"][:count]
    tokenizer = load_tokenizer(str(folders["judge"]))
    chats = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}] for text in texts]
    expected = plain_scores(folders["reward"], [render(tokenizer, chat, generation=False) for chat in chats])
    result = launched.groups["texts"].compute_rm_score(texts_batch(folders, texts, list(range(count))))
    assert result.batch["rm_scores"].tolist() == pytest.approx(expected, abs=1e-5)


def written(parts: list[Judgements]) -> list[str]:
    """The end of each row's first judgement, which is random letters and named by the failure to read it."""
    found = [message for part in parts for _, _, message in part.outcomes.failures]
    assert len(found) == sum(len(unpack_outcomes(part.outcomes)) for part in parts)
    return found


def test_judgements_depend_on_response_and_number_alone(launched: Launched, folders: dict[str, Path]) -> None:
    judge, texts, numbers = launched.groups["judge"], ["one", "two", "three"], [70, 71, 72]
    parts = judge.generate_judgements(texts_batch(folders, texts, numbers))
    assert [len(unpack_outcomes(part.outcomes)) for part in parts] == [2, 1]
    assert sum(part.num_written for part in parts) == SAMPLES * 3 and sum(part.num_read for part in parts) == 0
    last = written(parts)[2:]
    assert written(judge.generate_judgements(texts_batch(folders, texts[2:], [72]))) == last  # alone, so on the other rank
    assert written(judge.generate_judgements(texts_batch(folders, texts[2:], [5]))) != last


def test_a_greedy_judge_writes_what_its_checkpoint_would(folders: dict[str, Path]) -> None:
    """In process: the weights come from the checkpoint, no update follows."""
    runtime = WorkerRuntime(device="cpu", seed=1, max_prompt_length=8, max_response_length=4, deadline_s=600.0)
    judge = JudgeConfig(
        model=JudgeModelConfig(path=str(folders["judge"])),
        prompt_template="{response}",
        max_prompt_length=64,
        max_tokens=NEW_TOKENS,
        name="hf",
    )
    texts, role = ["one", "two words", "3"], ClassWithInitArgs(JudgeWorker, judge, policy_of(folders), runtime)
    with launch({"judge": role}, LaunchOptions(backend="local")) as run:
        run.groups["judge"].init_model()
        found = written(run.groups["judge"].generate_judgements(texts_batch(folders, texts, [0, 1, 2])))
    model = AutoModelForCausalLM.from_pretrained(folders["judge"], dtype=torch.float32).eval()
    tokenizer = load_tokenizer(str(folders["judge"]))
    for text, message in zip(texts, found, strict=True):
        prompt = render(tokenizer, [{"role": "user", "content": text}], generation=True)
        expected, _ = greedy_reference(model, prompt, NEW_TOKENS)
        assert message.endswith(repr(tokenizer.decode(expected, skip_special_tokens=True)))
