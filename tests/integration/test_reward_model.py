"""Reward model and judge as real worker processes on two ranks, against transformers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhub.config.sections.reward import JudgeConfig, JudgeModelConfig, RewardModelConfig, ScoringModelConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.trainer import DeadlineConfig
from rlhub.rewards.rendering import padded
from rlhub.single_controller import ClassWithInitArgs, Launched, LaunchOptions, launch
from rlhub.trainer.ppo.scoring import JudgeGenerator
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


@pytest.fixture(scope="module")
def launched(ray_cluster: None, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    runtime = WorkerRuntime(device="cpu", seed=1, max_prompt_length=8, max_response_length=4, deadline_s=600.0)
    judge = JudgeConfig(
        model=JudgeModelConfig(path=str(folders["judge"])),
        n=SAMPLES,
        temperature=1.0,
        max_prompt_length=16,
        max_tokens=NEW_TOKENS,
        name="hf",
    )
    roles = {
        "reward": ClassWithInitArgs(RewardModelWorker, reward_config(folders["reward"]), runtime),
        "padded": ClassWithInitArgs(RewardModelWorker, reward_config(folders["reward"], use_remove_padding=False), runtime),
        "flipped": ClassWithInitArgs(RewardModelWorker, reward_config(folders["flipped"]), runtime),
        "judge": ClassWithInitArgs(JudgeWorker, judge, RolloutConfig(), runtime),
    }
    logs = tmp_path_factory.mktemp("logs")
    with launch(roles, LaunchOptions(ranks_per_node=RANKS, log_dir=logs, deadline_s=DeadlineConfig(start=600.0))) as run:
        for group in run.groups.values():
            group.init_model()
        yield run


def scores_of(launched: Launched, role: str, rows: list[list[int]], *, left: bool = False) -> list[float]:
    batch = padded(rows, left=left)
    if left:
        batch.batch["input_ids"] = batch.batch["prompts"]
    result = launched.groups[role].compute_rm_score(batch)
    assert list(result.batch.keys()) == ["rm_scores"] and result.batch["rm_scores"].shape == (len(rows),)
    scores: list[float] = result.batch["rm_scores"].tolist()
    return scores


@pytest.mark.parametrize("role", ["reward", "padded"])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_scores_are_those_of_single_rows(launched: Launched, folders: dict[str, Path], role: str, left: bool, count: int) -> None:
    expected = plain_scores(folders["reward"], ROWS[:count])
    assert scores_of(launched, role, ROWS[:count], left=left) == pytest.approx(expected, abs=1e-5)
    assert count == 1 or max(expected) - min(expected) > 0.1


def test_a_flipped_head_reverses_the_rewards(launched: Launched) -> None:
    straight, flipped = scores_of(launched, "reward", ROWS), scores_of(launched, "flipped", ROWS)
    assert flipped == pytest.approx([-score for score in straight], abs=1e-6) and max(map(abs, straight)) > 0.1


async def ask(launched: Launched, prompts: list[list[int]], numbers: list[int]) -> list[list[list[int]]]:
    return await JudgeGenerator(launched.groups["judge"], SAMPLES)(prompts, numbers)


def test_judgements_depend_on_prompt_and_number_alone(launched: Launched) -> None:
    prompts, numbers = ROWS[:3], [70, 71, 72]
    answers = asyncio.run(ask(launched, prompts, numbers))
    assert [len(samples) for samples in answers] == [SAMPLES] * 3
    assert all(0 < len(ids) <= NEW_TOKENS for samples in answers for ids in samples)
    assert answers[0][0] != answers[0][1]
    assert asyncio.run(ask(launched, prompts[2:], numbers[2:])) == answers[2:]  # alone, and so on the other rank
    assert asyncio.run(ask(launched, prompts[2:], [5])) != answers[2:]


def test_a_greedy_judge_writes_what_its_checkpoint_would(folders: dict[str, Path]) -> None:
    """In process: the weights come from the checkpoint, no update follows."""
    runtime = WorkerRuntime(device="cpu", seed=1, max_prompt_length=8, max_response_length=4, deadline_s=600.0)
    judge = JudgeConfig(
        model=JudgeModelConfig(path=str(folders["judge"])), max_prompt_length=16, max_tokens=NEW_TOKENS, name="hf"
    )
    role = ClassWithInitArgs(JudgeWorker, judge, RolloutConfig(), runtime)
    with launch({"judge": role}, LaunchOptions(backend="local")) as run:
        run.groups["judge"].init_model()
        answers = asyncio.run(JudgeGenerator(run.groups["judge"], 1)(ROWS, list(range(len(ROWS)))))
    model = AutoModelForCausalLM.from_pretrained(folders["judge"], dtype=torch.float32).eval()
    for ids, (answer,) in zip(ROWS, answers, strict=True):
        expected, _ = greedy_reference(model, ids, NEW_TOKENS)
        end = model.generation_config.eos_token_id
        assert answer == (expected[: expected.index(end) + 1] if end in expected else expected)
