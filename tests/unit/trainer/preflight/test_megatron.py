"""What strategy=megatron cannot train is found before any process starts, from the model's config.json."""

from __future__ import annotations

import importlib.machinery
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhub.config.rules.derive import derive
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.trainer.preflight import checks as preflight
from rlhub.trainer.preflight.checks import check_engines

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


def write(folder: Path, **values: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MODEL | values))
    return str(folder)


def found(tmp_path: Path, change: Callable[[PPOConfig], Any], ranks: int = 4, **model: object) -> list[str]:
    config = PPOConfig()
    config.actor_rollout_ref.actor.strategy = "megatron"
    config.actor_rollout_ref.model.path = write(tmp_path / "model", **model)
    config.trainer.device, config.trainer.n_gpus_per_node = "cpu", ranks
    change(config)
    derive(config)
    return check_engines(config)


def sizes(tensor: int = 1, pipeline: int = 1, experts: int = 1) -> Callable[[PPOConfig], None]:
    def change(config: PPOConfig) -> None:
        megatron = config.actor_rollout_ref.actor.megatron
        megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size = tensor, pipeline
        megatron.expert_model_parallel_size = experts

    return change


def test_what_fits_passes(tmp_path: Path) -> None:
    assert found(tmp_path, sizes(tensor=2, pipeline=2)) == []
    assert found(tmp_path, sizes(experts=2), model_type="qwen3_moe", num_experts=4, moe_intermediate_size=8) == []


@pytest.mark.parametrize(
    ("change", "model", "part"),
    [
        (sizes(tensor=4), {"num_attention_heads": 6}, "does not divide the model's 6 attention heads"),
        (sizes(pipeline=2), {"num_hidden_layers": 3}, "3 layers"),
        (sizes(experts=4), {"model_type": "qwen3_moe", "num_experts": 6}, "the model's 6 experts"),
        (sizes(), {"model_type": "gpt2"}, "'gpt2'"),
    ],
)
def test_each_fault_is_named_with_the_section_and_only_once(
    tmp_path: Path, change: Callable[[PPOConfig], None], model: dict[str, object], part: str
) -> None:
    problems = [problem for problem in found(tmp_path, change, **model) if part in problem]
    assert len(problems) == 1, problems
    assert "critic" not in problems[0]


def test_the_critic_of_another_size_is_judged_by_itself(tmp_path: Path) -> None:
    def change(config: PPOConfig) -> None:
        sizes(pipeline=2)(config)
        derive(config)
        assert config.critic.model is not None
        config.critic.model.path = write(tmp_path / "critic", num_hidden_layers=5)

    (problem,) = found(tmp_path, change)
    assert problem.startswith("critic.megatron: 5 layers")


def test_sizes_that_cannot_be_are_left_to_the_configurations_own_rules(tmp_path: Path) -> None:
    assert found(tmp_path, sizes(tensor=2), ranks=3) == []


def test_other_engines_and_hub_names_are_not_judged(tmp_path: Path) -> None:
    def other(config: PPOConfig) -> None:
        config.actor_rollout_ref.actor.strategy = "fsdp2"

    assert found(tmp_path, other, model_type="gpt2") == []
    hub = PPOConfig()
    hub.actor_rollout_ref.actor.strategy, hub.actor_rollout_ref.model.path = "megatron", "Qwen/Qwen3-0.6B"
    hub.trainer.device = "cpu"
    derive(hub)
    assert check_engines(hub) == []


@pytest.mark.parametrize("cls", [SFTConfig, DPOConfig, RMConfig])
def test_the_supervised_trainers_ask_too(tmp_path: Path, cls: type[SFTConfig | DPOConfig | RMConfig]) -> None:
    config = cls(strategy="megatron")
    config.model.path, config.trainer.device = write(tmp_path / "model", model_type="gpt2"), "cpu"
    derive(config)
    assert len([problem for problem in preflight.check(config) if "'gpt2'" in problem]) == 1


def test_an_engine_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> importlib.machinery.ModuleSpec | None:
        return None if name == "megatron" else importlib.machinery.ModuleSpec(name, None)

    monkeypatch.setattr(preflight, "find_spec", find)
    (problem,) = found(tmp_path, sizes())
    assert problem.startswith("actor_rollout_ref.actor.strategy=megatron: megatron is not installed")
