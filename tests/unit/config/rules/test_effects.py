"""A setting that nothing reads is a warning, and only then."""

from __future__ import annotations

import pytest

from rlhub.config.rules import effects
from tests.unit.config.rules.test_checks import JUDGE, REWARD_MODEL
from tests.unit.config.rules.test_derive import good

_A, _R = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"


@pytest.mark.parametrize(
    ("key", "value", "cure"),
    [
        ("actor_rollout_ref.actor.kl_loss_coef", 0.1, {f"{_A}use_kl_loss": True}),
        ("algorithm.kl_ctrl.kl_coef", 0.1, {"algorithm__use_kl_in_reward": True}),
        ("algorithm.filter_groups.metric", "acc", {"algorithm__filter_groups__enable": True}),
        ("actor_rollout_ref.model.lora_alpha", 32.0, {"actor_rollout_ref__model__lora_rank": 8}),
        ("actor_rollout_ref.rollout.lora_sync", "adapter", {"actor_rollout_ref__model__lora_rank": 8}),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 9000, {f"{_A}use_dynamic_bsz": True}),
        ("actor_rollout_ref.actor.loss_scale_factor", 7.0, {f"{_A}loss_agg_mode": "seq-mean-token-sum-norm"}),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", 1.0, {f"{_R}val_kwargs__do_sample": True}),
        ("actor_rollout_ref.actor.optim.min_lr_ratio", 0.1, {f"{_A}optim__lr_scheduler_type": "cosine"}),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", 0.6, {"trainer__device": "cuda"}),
        ("custom_reward_function.name", "score", {"custom_reward_function__path": "x.py"}),
        ("trainer.resume_from_path", "x", {"trainer__resume_mode": "resume_path"}),
        ("reward_model.weight", 2.0, REWARD_MODEL),
        ("reward_model.model.path", "some/model", {"reward_model__enable": True}),
        ("reward_model.model.fsdp_config.fsdp_size", 1, REWARD_MODEL),
        ("reward_model.forward_max_token_len_per_gpu", 9000, REWARD_MODEL | {"reward_model__use_dynamic_bsz": True}),
        ("reward_model.max_length", 9, REWARD_MODEL | {"reward_model__model__input_tokenizer": "model"}),
        ("reward_model.judge.weight", 2.0, JUDGE),
    ],
)
def test_a_setting_nobody_reads_is_named_and_only_then(key: str, value: object, cure: dict[str, object]) -> None:
    setting = {key.replace(".", "__"): value}
    (warning,) = effects.without_effect(good(**setting), {key})
    assert warning.startswith(f"{key}={value} has no effect: ")
    assert effects.without_effect(good(**setting, **cure), {key}) == []
    assert effects.without_effect(good(**setting), set()) == []  # the user did not say it


@pytest.mark.parametrize(
    ("key", "value"),
    [("reward_model.timeout_s", 9.0), ("reward_model.reward_kwargs", {"a": 1}), ("custom_reward_function.path", "x.py")],
)
def test_without_a_function_its_settings_have_no_effect(key: str, value: object) -> None:
    setting = {key.replace(".", "__"): value}
    (warning,) = effects.without_effect(good(**REWARD_MODEL, **setting, reward_model__function_weight=0.0), {key})
    assert warning.endswith("has no effect: reward_model.function_weight is 0")
    assert effects.without_effect(good(**REWARD_MODEL, **setting), {key}) == []


def test_an_entropy_that_the_loss_reads_is_computed_anyway() -> None:
    key, unread = f"{_A}calculate_entropy".replace("__", "."), {f"{_A}calculate_entropy": False}
    (warning,) = effects.without_effect(good(**unread, **{f"{_A}entropy_coeff": 0.1}), {key})
    assert warning == f"{key}=false has no effect: entropy_coeff is set, and the loss reads the entropy"
    assert effects.without_effect(good(**unread), {key}) == []


def test_a_default_said_aloud_is_no_warning() -> None:
    assert effects.without_effect(good(), {"trainer.critic_warmup", "actor_rollout_ref.actor.kl_loss_coef"}) == []
