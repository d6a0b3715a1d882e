from __future__ import annotations

import torch

from rlhub.config.ppo import ActorRolloutRefConfig
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.engines.training.registry import TRAIN_ENGINES, build_policy_engine, build_reference_engine

CPU = torch.device("cpu")


def test_both_names_of_fsdp() -> None:
    assert TRAIN_ENGINES.get("fsdp") is TRAIN_ENGINES.get("fsdp2") is FSDPEngine


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
