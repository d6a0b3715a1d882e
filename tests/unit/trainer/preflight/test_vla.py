"""A policy of actions is refused before any process starts by engines that cannot run it, with the reason and the remedy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlhub.config.cli import prepare
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.data.episodes import RecordedEpisode, write_episodes
from rlhub.errors import ConfigError
from rlhub.trainer.preflight.checks import check
from tests.support import vla

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vla.write_policy(tmp_path_factory.mktemp("refused"))


def settings() -> str:
    return "{" + ", ".join(f"{name}: {value}".replace("True", "true") for name, value in vla.settings().items()) + "}"


def problems(policy: Path, *more: str) -> list[str]:
    """What a run in simulators would be refused for."""
    overrides = [
        *("env.name=reach_color", f"actor_rollout_ref.model.path={policy}", f"actor_rollout_ref.model.vla={settings()}"),
        *("algorithm.adv_estimator=chunk_gae", f"{ACTOR}.value_loss_coef=0.5", f"{ACTOR}.ppo_mini_batch_size=4"),
        *("data.train_batch_size=8", "data.max_prompt_length=16", f"data.max_response_length={vla.TOKENS}"),
        *("trainer.device=cpu", "trainer.backend=local", f"{ROLLOUT}.name=hf", *more),
    ]
    try:
        prepare(PPOConfig, "ppo", overrides, preflight=check)
    except ConfigError as error:
        return list(error.problems)
    return []


def test_hf_and_fsdp_run_it(policy: Path) -> None:
    assert problems(policy) == []


def test_vllm_says_what_it_cannot_do(policy: Path) -> None:
    found = [one for one in problems(policy, f"{ROLLOUT}.name=vllm") if one.startswith(f"{ROLLOUT}.name=vllm: the model")]
    assert len(found) == 1, found
    assert "the model reads images" in found[0] and "sampling at given places and the value head" in found[0]
    assert found[0].endswith(f"set {ROLLOUT}.name=hf")


def test_megatron_says_what_it_cannot_do(policy: Path) -> None:
    found = [one for one in problems(policy, f"{ACTOR}.strategy=megatron") if "does not know models" in one]
    assert len(found) == 1, found
    assert "decodes all action tokens at their places" in found[0] and "no head for a policy's own values" in found[0]
    assert found[0].endswith("Use strategy=fsdp2")


def test_megatron_does_not_clone_it_either(policy: Path, tmp_path: Path) -> None:
    frames, actions = np.zeros((2, 32, 32, 3), np.uint8), np.zeros((2, vla.ACTION_DIM), np.float32)
    write_episodes(tmp_path / "train", [RecordedEpisode(instruction="reach red", images={"top": frames}, actions=actions)])
    overrides = [
        f"model.path={policy}",
        f"model.vla={settings()}",
        f"data.train_files={tmp_path / 'train'}",
        "trainer.device=cpu",
    ]
    with pytest.raises(ConfigError, match="strategy=megatron does not know models that read images.*Use strategy=fsdp2"):
        prepare(SFTConfig, "sft", [*overrides, "strategy=megatron"], preflight=check)
