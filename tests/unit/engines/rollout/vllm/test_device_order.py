"""On a GPU threads have streams of their own: steps keep to the builder's, and weights are written while nothing runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm.engine import VLLMEngine
from rlhub.engines.rollout.vllm.environment import agree_on_stream, own_stream

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def engine_on(device: torch.device) -> VLLMEngine:
    return VLLMEngine(
        RolloutSetup(
            config=RolloutConfig(), model=ModelConfig(), device=device, seed=0, max_prompt_length=4, max_response_length=4
        )
    )


@pytest.mark.parametrize(("device", "waits"), [(CUDA, 1), (CPU, 0)])
def test_weights_are_written_between_two_waits_for_the_device(
    device: torch.device, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    engine = engine_on(device)
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    monkeypatch.setattr(engine, "_llm", SimpleNamespace(weights_changed=lambda: calls.append("forget")))
    with engine.overwriting(3):
        calls.append("write")
    assert calls == [device] * waits + ["write"] + [device] * waits + ["forget"] and engine.version == 3


def test_a_stepping_thread_takes_the_stream_of_the_building_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "set_stream", taken.append)
    agree_on_stream(own_stream(CUDA))
    agree_on_stream(own_stream(CPU))
    assert taken == ["stream of cuda:0"]
