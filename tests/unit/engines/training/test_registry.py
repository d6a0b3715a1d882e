from __future__ import annotations

import pytest
import torch

from rlhub.config.rules.derive import derive
from rlhub.config.sections.ppo import ActorRolloutRefConfig, PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.engines.training.registry import (
    TRAIN_ENGINES,
    build_dpo_engine,
    build_dpo_reference_engine,
    build_policy_engine,
    build_reference_engine,
    build_reward_engine,
    build_rm_engine,
    build_sft_engine,
    build_value_engine,
)

CPU = torch.device("cpu")


def test_both_names_of_fsdp() -> None:
    assert TRAIN_ENGINES.get("fsdp") is TRAIN_ENGINES.get("fsdp2") is FSDPEngine


def test_each_engine_gets_its_own_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the role; the names of engines that are not installed are no obstacle."""
    given = []
    monkeypatch.setattr(TRAIN_ENGINES.row("megatron"), "target", lambda model, section, optim, **rest: given.append(section))
    config = PPOConfig()
    config.trainer.device, config.actor_rollout_ref.actor.strategy = "cpu", "megatron"
    config.actor_rollout_ref.actor.megatron.tensor_model_parallel_size = 3
    derive(config)
    build_policy_engine(config.actor_rollout_ref, device=CPU, seed=1)
    build_reference_engine(config.actor_rollout_ref, device=CPU, seed=1)
    build_value_engine(config.critic, device=CPU, seed=1)
    build_reward_engine(config.reward_model, device=CPU, seed=1)
    dpo = DPOConfig(strategy="megatron", megatron=config.actor_rollout_ref.actor.megatron)
    dpo.trainer.device = "cpu"
    derive(dpo)
    build_dpo_engine(dpo, device=CPU, seed=1)
    build_dpo_reference_engine(dpo, device=CPU, seed=1)
    build_sft_engine(SFTConfig(strategy="megatron", megatron=dpo.megatron), device=CPU, seed=1)
    build_rm_engine(RMConfig(strategy="megatron", megatron=dpo.megatron), device=CPU, seed=1)
    assert [section.tensor_model_parallel_size for section in given] == [3] * 8


def test_settings_reach_the_engine() -> None:
    config = ActorRolloutRefConfig()
    config.actor.ppo_micro_batch_size_per_gpu = 4
    config.rollout.temperature = 0.5
    config.ref.log_prob_use_dynamic_bsz = True
    config.ref.log_prob_max_token_len_per_gpu = 99
    policy = build_policy_engine(config, device=CPU, seed=3)
    assert isinstance(policy, FSDPEngine)
    assert (policy.temperature, policy.optim_config) == (0.5, config.actor.optim)
    assert policy.micro_batch == policy.infer_micro_batch == MicroBatchConfig(rows=4)
    reference = build_reference_engine(config, device=CPU, seed=3)
    assert isinstance(reference, FSDPEngine)
    assert (reference.optim_config, reference.infer_micro_batch) == (None, MicroBatchConfig(max_tokens=99))
    frozen = build_policy_engine(config, device=CPU, seed=3, train=False)
    assert isinstance(frozen, FSDPEngine) and frozen.optim_config is None
