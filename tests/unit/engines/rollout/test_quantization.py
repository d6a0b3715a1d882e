"""What cannot generate with quantized weights is refused by its name before the start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhub.config.rules.checks import check_quantization
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.serve import ServeConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout import registry
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine, quantization_problems
from rlhub.errors import EngineError
from rlhub.protocol.weights import pieces
from rlhub.trainer.ppo.metrics import mismatch_bound
from rlhub.trainer.preflight import rollout
from rlhub.trainer.preflight.rollout import check_rollout_engine, check_weights_reach, check_weights_read
from rlhub.trainer.preflight.serve import check as check_server
from tests.support.model_shapes import save_shape

NONE = frozenset[str]()


def test_both_sides_have_the_same_blocks() -> None:
    assert registry.BLOCK == pieces.BLOCK


@pytest.mark.parametrize(
    ("name", "shape", "device", "values", "part"),
    [
        ("hf", "Qwen2.5-0.5B", "cpu", {}, ""),
        ("hf", "Qwen2.5-0.5B", "cuda", {"mode": "async"}, ""),
        ("vllm", "Qwen2.5-0.5B", "cuda", {}, ""),
        ("vllm", "Qwen2.5-7B", "cuda", {"tensor_model_parallel_size": 4}, ""),
        ("vllm", "Qwen2.5-7B", "cuda", {"mode": "async"}, ""),
        ("vllm", "Qwen2.5-0.5B", "cpu", {}, "name=hf, or run on GPUs"),
        ("vllm", "Qwen2.5-0.5B", "cuda", {"dtype": "float32"}, "dtype=bfloat16"),
        ("vllm", "Qwen2.5-7B", "cuda", {"mode": "async", "tensor_model_parallel_size": 2}, "set it to 1"),
        ("vllm", "Qwen2.5-0.5B", "cuda", {"tensor_model_parallel_size": 2}, "14 heads x 64 / 2 ranks = 448"),
        ("vllm", "Qwen2.5-0.5B", "cuda", {"tensor_model_parallel_size": 2}, "2 key-value heads x 64 / 2 ranks = 64"),
        ("hf", "Qwen3-30B-A3B", "cuda", {}, "128 experts"),
        ("vllm", "Qwen3-30B-A3B", "cuda", {}, "128 experts"),
        ("hf", "Qwen2.5-0.5B", "cpu", {"lora_sync": "adapter"}, "lora_sync=merged"),
        ("vllm_async", "Qwen2.5-0.5B", "cuda", {"mode": "async"}, "to one of hf, vllm"),
        ("remote", "Qwen2.5-0.5B", "cpu", {}, "holds its weights as they are"),
        ("fake", "Qwen2.5-0.5B", "cpu", {}, "holds its weights as they are"),
    ],
)
def test_engines_and_models(tmp_path: Path, name: str, shape: str, device: str, values: dict[str, object], part: str) -> None:
    model = ModelConfig(path=str(save_shape(tmp_path / "model", shape)), lora_rank=8 if "lora_sync" in values else 0)
    config = RolloutConfig(name=name, quantization="fp8", **values)  # type: ignore[arg-type]
    found = quantization_problems(config, model, device=device)
    assert len(found) == bool(part)
    assert all(part in text and f"rollout.quantization=fp8 with actor_rollout_ref.rollout.name={name}" in text for text in found)
    config.quantization = None
    assert quantization_problems(config, model, device=device) == []


def test_a_policy_of_actions_is_refused() -> None:
    (problem,) = quantization_problems(RolloutConfig(name="hf", quantization="fp8"), ModelConfig(vla={"chunk": 1}), device="cpu")
    assert "model.vla" in problem


@pytest.mark.parametrize(("name", "part"), [("hf", ""), ("vllm", "model's files as if they were quantized already")])
def test_an_engine_that_cannot_quantize_files_evaluates_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: str
) -> None:
    """Found before the start: weights that a trainer sends can be quantized on the way to both."""
    monkeypatch.setattr(rollout, "resolve_device", lambda device: device)
    config = quantized()
    config.actor_rollout_ref.model.path = str(save_shape(tmp_path / "model", "Qwen2.5-0.5B"))
    config.actor_rollout_ref.rollout.name, config.trainer.device = name, "cuda"
    assert check_rollout_engine(config) == []
    found = check_weights_read(config)
    assert len(found) == bool(part) and all(part in text for text in found)


def quantized(**correction: object) -> PPOConfig:
    config = PPOConfig()
    config.actor_rollout_ref.rollout.name, config.actor_rollout_ref.rollout.quantization = "hf", "fp8"
    config.trainer.device = "cpu"
    for key, value in correction.items():
        setattr(config.algorithm.rollout_correction, key, value)
    return config


def test_samples_of_rounded_weights_are_corrected_where_they_train() -> None:
    (problem,) = check_weights_reach(quantized())
    assert "rollout_correction.rollout_is=token" in problem and "quantization=null" in problem
    assert check_rollout_engine(quantized()) == [], "evaluation trains nothing"
    for correction in ({"rollout_is": "token"}, {"rollout_rs": ["token_k1"]}, {"bypass_mode": True}, {"m2po_threshold": 0.04}):
        assert check_weights_reach(quantized(**correction)) == []
    assert check_quantization(quantized(), frozenset({"rollout_log_probs"})) == [], "the loss compares with the sampler itself"
    replayed = quantized()
    replayed.trainer.replay_from = "batches"
    assert check_quantization(replayed, NONE) == []
    plain = quantized()
    plain.actor_rollout_ref.rollout.quantization = None
    assert check_quantization(plain, NONE) == []


def test_the_bound_of_mismatch_is_that_of_fewer_bits() -> None:
    config = quantized(rollout_is="token")
    assert (mismatch_bound(config).warn, mismatch_bound(config).stop) == (0.1, 1.0)
    config.actor_rollout_ref.rollout.quantization = None
    assert (mismatch_bound(config).warn, mismatch_bound(config).stop) == (1e-3, 0.1)


def test_a_server_is_refused(tmp_path: Path) -> None:
    config = ServeConfig()
    config.model.path, config.rollout.name = str(save_shape(tmp_path / "model", "Qwen2.5-0.5B")), "hf"
    config.device, config.rollout.quantization = "cpu", "fp8"
    assert any("rollout.quantization=fp8: only weights of a trainer" in problem for problem in check_server(config, set()))


def test_vllm_does_not_read_files_as_if_they_were_quantized() -> None:
    setup = RolloutSetup(
        config=RolloutConfig(name="vllm", quantization="fp8"),
        model=ModelConfig(path="nowhere"),
        device=torch.device("cpu"),
        seed=0,
        max_prompt_length=8,
        max_response_length=8,
        load_checkpoint=True,
    )
    with pytest.raises(EngineError, match=r"quantization=fp8.*name=hf"):
        build_rollout_engine(setup)
