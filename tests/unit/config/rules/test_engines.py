"""Which section a training engine reads, and whether its sizes fit its ranks and those it shares them with."""

from __future__ import annotations

from typing import Any

import pytest

from rlhub.config.load import interpret
from rlhub.config.rules import checks, effects, engines
from rlhub.config.rules.derive import derive
from rlhub.config.rules.parallel import Ranks, all_ranks, data_parallel, ranks_per_copy
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.training import SECTIONS, FSDPConfig, MegatronConfig, section_of
from rlhub.engines.training.registry import TRAIN_ENGINES
from tests.unit.config.rules.test_derive import put

ACTOR = "actor_rollout_ref__actor__"
MEGATRON = {f"{ACTOR}strategy": "megatron", "trainer__n_gpus_per_node": 4}
TWO_STAGES = f"{ACTOR}megatron__pipeline_model_parallel_size"


def loaded(cls: type, **values: object) -> Any:
    """As from the command line: unset sections follow their source."""
    nested: dict[str, Any] = {}
    for path, value in ({"trainer__device": "cpu"} | values).items():
        *parents, last = path.split("__")
        node = nested
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
    found = interpret(cls, nested, [])
    assert found.problems == []
    derive(found.config)
    return found.config


def tp(size: int, role: str = ACTOR) -> dict[str, object]:
    return {f"{role}megatron__tensor_model_parallel_size": size}


def test_every_engine_has_a_section() -> None:
    assert set(TRAIN_ENGINES.names()) == set(SECTIONS)


def test_roles_follow_the_actor_unless_said() -> None:
    config = loaded(PPOConfig, **MEGATRON, **tp(2), reward_model__enable=True, reward_model__model__path="m")
    assert config.critic.strategy == config.reward_model.strategy == "megatron"
    found = engines.engines(config)
    assert [engine.key.removeprefix("actor_rollout_ref.") for engine in found] == [
        "actor.megatron", "ref.megatron", "critic.megatron", "reward_model.megatron"
    ]  # fmt: skip
    assert {ranks_per_copy(engine.section) for engine in found} == {2}
    other = loaded(PPOConfig, **MEGATRON, critic__strategy="fsdp2", reward_model__strategy="fsdp", reward_model__enable=True)
    sections = {engine.role: engine.key for engine in engines.engines(other)}
    assert (sections["critic"], sections["reward_model"]) == ("critic.fsdp_config", "reward_model.model.fsdp_config")
    assert isinstance(loaded(PPOConfig).critic.section, FSDPConfig)


def test_what_follows_is_a_copy() -> None:
    config = loaded(PPOConfig, **MEGATRON)
    sections = [engine.section for engine in engines.engines(config)]
    assert len({id(section) for section in sections}) == len(sections)
    in_code = PPOConfig()
    put(in_code, trainer__device="cpu", actor_rollout_ref__actor__megatron__override_transformer_config={"a": 1})
    derive(in_code)
    assert in_code.critic.megatron is not None
    in_code.critic.megatron.override_transformer_config["a"] = 2
    assert in_code.actor_rollout_ref.actor.megatron.override_transformer_config == {"a": 1}


def test_only_data_parallel_ranks_divide_rows() -> None:
    four = Ranks(count=4, name="4 ranks", text="4 ranks")
    cut = MegatronConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert [data_parallel(section, four).count for section in (FSDPConfig(), MegatronConfig(), cut)] == [4, 4, 1]
    small = {"data__train_batch_size": 1, f"{ACTOR}ppo_mini_batch_size": 1, **MEGATRON}
    assert checks.check(loaded(PPOConfig, **small, **tp(4))) == []
    (problem,) = checks.check(loaded(PPOConfig, **small, **tp(2)))
    assert "1 prompts x n=1 = 1 samples cannot feed" in problem
    assert "= 4 ranks / 2 that share a copy of the model = 2 data-parallel ranks" in problem
    supervised = {"strategy": "megatron", "trainer__n_gpus_per_node": 2, "data__train_batch_size": 1}
    assert checks.check(loaded(SFTConfig, **supervised, **tp(2, ""))) == []
    (problem,) = checks.check(loaded(SFTConfig, **supervised))
    assert "cannot feed trainer.nnodes=1 x trainer.n_gpus_per_node=2 = 2 ranks" in problem


def test_uneven_shares_are_counted_over_data_parallel_ranks() -> None:
    three = {"data__train_batch_size": 3, f"{ACTOR}ppo_mini_batch_size": 3, **MEGATRON}
    assert checks.notes(loaded(PPOConfig, **three, **tp(4))) == []
    assert "3 samples = 2 ranks x 1 + 1" in checks.notes(loaded(PPOConfig, **three, **tp(2)))[0]


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (tp(3), ("actor.megatron: tensor 3 x pipeline 1 x context 1 = 3 ranks", "= 4 ranks: 4 = 1 x 3 + 1")),
        (tp(2) | {TWO_STAGES: 4}, ("tensor 2 x pipeline 4 x context 1 = 8 ranks", "4 = 0 x 8 + 4")),
        (
            tp(2) | {f"{ACTOR}megatron__expert_model_parallel_size": 4},
            (
                "expert_model_parallel_size=4",
                "= 4 ranks / 2 that share a copy of the model = 2 data-parallel ranks, 2 = 0 x 4 + 2",
            ),
        ),
        ({f"{ACTOR}megatron__virtual_pipeline_model_parallel_size": 2}, ("pipeline_model_parallel_size=1", "2 or more")),
        ({f"{ACTOR}megatron__sequence_parallel": True}, ("sequence_parallel=true", "tensor_model_parallel_size=1")),
        ({"actor_rollout_ref__model__lora_adapter_path": "there"}, ("lora_adapter_path=there", "lora_rank=0: set it")),
        (
            tp(2) | tp(4, "critic__"),
            ("critic.megatron.tensor_model_parallel_size=4 but actor_rollout_ref.actor.megatron", "share"),
        ),
        (
            {"actor_rollout_ref__ref__megatron__pipeline_model_parallel_size": 2},
            ("actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2 but actor_rollout_ref.actor.megatron", "=1"),
        ),
    ],
)
def test_what_does_not_fit_is_named_once(values: dict[str, object], parts: tuple[str, ...]) -> None:
    (problem,) = checks.check(loaded(PPOConfig, **MEGATRON, **values))
    assert all(part in problem for part in parts), problem


@pytest.mark.parametrize(
    "values",
    [
        tp(4),
        tp(2) | {TWO_STAGES: 2, f"{ACTOR}megatron__virtual_pipeline_model_parallel_size": 2},
        tp(2) | {"actor_rollout_ref__ref__megatron__param_offload": True, "critic__megatron__optimizer_offload": True},
        tp(2) | {"actor_rollout_ref__rollout__tensor_model_parallel_size": 4},
        {f"{ACTOR}megatron__expert_model_parallel_size": 4},
        tp(2) | {"critic__strategy": "fsdp2"},
    ],
)
def test_what_fits_passes(values: dict[str, object]) -> None:
    assert checks.check(loaded(PPOConfig, **MEGATRON, **values)) == []


def test_a_role_with_ranks_of_its_own_is_measured_on_those() -> None:
    own = {"trainer__pools": {"second": {"n_gpus_per_node": 2}}, "trainer__placement": {"critic": "second"}}
    assert checks.check(loaded(PPOConfig, **MEGATRON, **own, **tp(4), **tp(2, "critic__"))) == []
    (problem,) = checks.check(loaded(PPOConfig, **MEGATRON, **own, **tp(4)))
    assert "critic.megatron: tensor 4" in problem and "trainer.pools.second.n_gpus_per_node=2 = 2 ranks: 2 = 0 x 4 + 2" in problem


def test_a_preference_reference_has_the_policys_sizes() -> None:
    settings = {"strategy": "megatron", "trainer__n_gpus_per_node": 2, **tp(2, "")}
    same = loaded(DPOConfig, **settings, ref_megatron__param_offload=True)
    assert checks.check(same) == [] and isinstance(same.ref_section, MegatronConfig) and same.ref_section.param_offload
    (problem,) = checks.check(loaded(DPOConfig, **settings, ref_megatron__tensor_model_parallel_size=1))
    assert problem.startswith("ref_megatron.tensor_model_parallel_size=1 but megatron.tensor_model_parallel_size=2")


@pytest.mark.parametrize(
    ("key", "value", "kept", "cure"),
    [
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size", 1, MEGATRON, {f"{ACTOR}strategy": "fsdp2"}),
        ("actor_rollout_ref.actor.megatron.grad_offload", True, {}, MEGATRON),
        ("actor_rollout_ref.model.use_remove_padding", False, MEGATRON, {f"{ACTOR}strategy": "fsdp2"}),
        ("critic.megatron.grad_offload", True, {}, {"critic__strategy": "megatron"}),
        ("critic.fsdp_config.param_offload", True, MEGATRON, {"critic__strategy": "fsdp"}),
        (
            "actor_rollout_ref.actor.megatron.recompute_granularity",
            "selective",
            MEGATRON | {"actor_rollout_ref__model__enable_gradient_checkpointing": False},
            {"actor_rollout_ref__model__enable_gradient_checkpointing": True},
        ),
        (
            "reward_model.megatron.grad_offload",
            True,
            MEGATRON | {"reward_model__enable": True, "reward_model__strategy": "fsdp2"},
            {"reward_model__strategy": "megatron"},
        ),
    ],
)
def test_what_the_engine_does_not_read_is_named(
    key: str, value: object, kept: dict[str, object], cure: dict[str, object]
) -> None:
    setting = {**kept, key.replace(".", "__"): value}
    (warning,) = effects.without_effect(loaded(PPOConfig, **setting), {key})
    assert warning.startswith(f"{key}={'true' if value is True else 'false' if value is False else value} has no effect: ")
    assert effects.without_effect(loaded(PPOConfig, **setting | cure), {key}) == []


def test_an_underived_configuration_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="derive first"):
        section_of(None, FSDPConfig())
    assert all_ranks(loaded(PPOConfig, **MEGATRON).trainer).text.endswith("= 4 ranks")
