import subprocess
import sys
from typing import Literal

import pytest
import torch

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.registry import (
    RECORDING_PROBLEMS,
    ROLLOUT_ENGINES,
    RolloutSetup,
    engine_factory,
    resolve_engine_name,
)
from rlhub.engines.rollout.vllm.async_engine import AsyncVLLMEngine
from rlhub.errors import EngineError, RegistryError

LIGHT = """
import sys
import rlhub.engines.rollout.registry as registry
assert registry.ROLLOUT_ENGINES.names() == ["fake", "hf", "remote", "vllm", "vllm_async"]
registry.resolve_engine_name("auto")
assert not {"torch", "vllm", "transformers"} & set(sys.modules), "heavy import"
"""


def test_names_can_be_checked_without_loading_anything_heavy() -> None:
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=300)


def test_auto_is_vllm_where_installed_else_hf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhub.engines.rollout.registry.find_spec", lambda name: object())
    assert resolve_engine_name(RolloutConfig().name) == "vllm"
    monkeypatch.setattr("rlhub.engines.rollout.registry.find_spec", lambda name: None)
    assert resolve_engine_name(RolloutConfig().name) == "hf"
    assert resolve_engine_name("fake") == "fake"


def test_an_unknown_engine_is_refused_with_a_suggestion() -> None:
    with pytest.raises(RegistryError, match="did you mean 'vllm'"):
        ROLLOUT_ENGINES.get("vlm")


@pytest.mark.parametrize(
    ("name", "mode", "size", "factory"),
    [
        ("vllm", "async", 1, "VLLMEngine"),
        ("vllm", "async", 2, "AsyncVLLMEngine"),
        ("vllm", "sync", 2, "VLLMEngine"),
        ("vllm_async", "async", 1, "AsyncVLLMEngine"),
        ("vllm_async", "async", 2, "AsyncVLLMEngine"),
        ("hf", "async", 2, "HFEngine"),
    ],
)
def test_which_engine_serves(name: str, mode: Literal["sync", "async"], size: int, factory: str) -> None:
    config = RolloutConfig(name=name, mode=mode, tensor_model_parallel_size=size)
    assert engine_factory(config).__name__ == factory  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "mode", "size", "parts"),
    [
        ("hf", "async", 2, ("tensor_model_parallel_size=2", "one device", "name=vllm")),
        ("hf", "sync", 1, ()),
        ("vllm_async", "sync", 1, ("mode=sync", "mode=async")),
        ("vllm_async", "async", 2, ()),
    ],
)
def test_what_an_engine_cannot_do_is_known_before_the_start(
    name: str, mode: Literal["sync", "async"], size: int, parts: tuple[str, ...]
) -> None:
    config = RolloutConfig(name=name, mode=mode, tensor_model_parallel_size=size)
    problems = ROLLOUT_ENGINES.companion(name, "problems")(config, trains=True)
    assert len(problems) == bool(parts) and all(part in problem for part in parts for problem in problems)


def test_an_engine_of_the_service_says_where_its_weights_are() -> None:
    def setup(mode: Literal["sync", "async"]) -> RolloutSetup:
        config = RolloutConfig(mode=mode)
        return RolloutSetup(
            config=config, model=ModelConfig(), device=torch.device("cpu"), seed=0, max_prompt_length=8, max_response_length=8
        )

    with pytest.raises(EngineError, match="set rollout.mode=async"):
        AsyncVLLMEngine(setup("sync"))
    engine = AsyncVLLMEngine(setup("async"))
    with pytest.raises(EngineError, match="not initialized"):
        engine.pause()
    for action in (lambda: engine.update_weights([], 1), engine.live_weights):
        with pytest.raises(EngineError, match="publish them through a folder"):
            action()
    engine.shutdown()


@pytest.mark.parametrize(
    ("device", "given", "sequences", "tokens"),
    [
        ("cuda", {}, None, None),  # which vLLM fills from the GPU's memory
        ("cuda", {"max_num_seqs": 64}, 64, None),
        ("cuda", {"max_num_batched_tokens": 100}, None, 300),
        ("cuda", {"max_num_seqs": 512, "max_num_batched_tokens": 100}, 512, 512),
        ("cpu", {}, 256, 8192),
        ("cpu", {"max_num_seqs": 64, "max_num_batched_tokens": 100}, 64, 300),
    ],
)
def test_limits_that_nobody_set_are_the_engines_own_on_a_gpu(
    device: str, given: dict[str, int], sequences: int | None, tokens: int | None
) -> None:
    setup = RolloutSetup(
        config=RolloutConfig(**given),
        model=ModelConfig(path="model"),
        device=torch.device(device),
        seed=0,
        max_prompt_length=200,
        max_response_length=100,
    )
    assert setup.step_limits() == {"max_num_seqs": sequences, "max_num_batched_tokens": tokens}


def test_which_engines_tell_the_experts_of_tokens() -> None:
    def reasons(name: str, device: str, **settings: object) -> list[str] | None:
        judge = ROLLOUT_ENGINES.companion(name, RECORDING_PROBLEMS)
        found: list[str] | None = None if judge is None else judge(RolloutConfig(name=name, **settings), device)  # type: ignore[arg-type]
        return found

    assert reasons("hf", "cpu") == reasons("vllm", "cuda") == []
    assert reasons("remote", "cuda") is reasons("fake", "cpu") is reasons("vllm_async", "cuda") is None
    for part, found in {
        "rollout.name=hf": reasons("vllm", "cpu"),
        "enable_prefix_caching=true": reasons("vllm", "cuda", enable_prefix_caching=False),
        "tensor_model_parallel_size=1": reasons("vllm", "cuda", tensor_model_parallel_size=2),
    }.items():
        assert found is not None and len(found) == 1 and part in found[0]
