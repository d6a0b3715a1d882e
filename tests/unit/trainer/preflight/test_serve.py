"""What is found wrong with a server before an engine is built."""

from __future__ import annotations

import pytest

from rlhub.config.sections.serve import ServeConfig
from rlhub.trainer.preflight import serve as serve_checks
from rlhub.trainer.preflight.serve import check


@pytest.mark.parametrize("name", ["vllm", "vllm_async"])
def test_an_engine_in_parts_is_served_by_vllm(name: str) -> None:
    config = ServeConfig(device="cpu")
    config.rollout.name, config.rollout.tensor_model_parallel_size = name, 2
    assert check(config, set()) == []


def test_each_finding_names_its_key() -> None:
    config = ServeConfig(device="cpu", plugins=["no_such_module_here"])
    config.rollout.name, config.rollout.tensor_model_parallel_size, config.server.tool_format = "hf", 2, "hermse"
    plugin, tool_format, size = check(config, set())
    assert plugin.startswith("plugins: importing 'no_such_module_here' failed")
    assert tool_format.startswith("server.tool_format: ") and "hermes" in tool_format
    assert size.startswith("rollout.tensor_model_parallel_size=2 with rollout.name=hf") and "rollout.name=vllm" in size
    config.rollout.name = "hff"
    assert any(problem.startswith("rollout.name: ") for problem in check(config, set()))


def test_a_driver_that_cannot_be_used_is_found_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"count_gpus": 1, "torch_has_cuda": True, "driver_problem": "the NVIDIA driver 535.1 is too old"}.items():
        monkeypatch.setattr(serve_checks, name, lambda value=value: value)
    for device in ("auto", "cuda"):
        (problem,) = check(ServeConfig(device=device), set())
        assert problem == f"device={device}: the NVIDIA driver 535.1 is too old; device=cpu serves without"
    assert check(ServeConfig(device="cpu"), set()) == []
