"""Throughput from counted operations: against a count by hand, and silent without work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlhub.config.sections.training import ModelConfig
from rlhub.models.throughput import ThroughputMeter, peak_tflops

SIZES = {
    "model_type": "qwen2",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


PER_LAYER = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16  # q, k and v, o, the three of the MLP
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
ATTENTION = 2 * 2 * 2 * 4 * (4 * 4 + 2 * 2)  # 2 * layers * heads * head size * sum of squared lengths


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    return ModelConfig(path=str(tmp_path))


def test_counts_weights_and_attention_per_second(model: ModelConfig) -> None:
    """Two passes over the batch of half a second each, forward and backward."""
    meter = ThroughputMeter(model, torch.device("cpu"))
    expected = 3 * 2 * (2 * 6 * (2 * PER_LAYER + 8 * 10) + ATTENTION) / 1.0 / 1e12
    assert meter.training("actor", MASK, epochs=2, seconds=1.0) == {"perf/tflops/actor": pytest.approx(expected)}


def test_utilisation_is_the_share_of_the_devices_peak(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A critic without a language-model head, and a forward pass of the actor, on a device of 312 TFLOP/s."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    device = torch.device("cuda", 0)
    critic = ThroughputMeter(model, device, head=False).training("critic", MASK, epochs=1, seconds=1e-9)
    tflops = 3 * (2 * 6 * 2 * PER_LAYER + ATTENTION) / 1e-9 / 1e12
    assert critic == {"perf/tflops/critic": pytest.approx(tflops), "perf/mfu/critic": pytest.approx(tflops / 312)}
    infer = ThroughputMeter(model, device).metrics("actor_infer", MASK, 1, 1e-9)
    tflops = (2 * 6 * (2 * PER_LAYER + 8 * 10) + ATTENTION) / 1e-9 / 1e12
    assert infer == {"perf/tflops/actor_infer": pytest.approx(tflops), "perf/mfu/actor_infer": pytest.approx(tflops / 312)}


def test_ranks_that_share_a_copy_share_its_work(model: ModelConfig) -> None:
    alone, shared = (ThroughputMeter(model, torch.device("cpu"), ranks).training("x", MASK, 1, 1.0) for ranks in (1, 4))
    assert alone["perf/tflops/x"] == pytest.approx(4 * shared["perf/tflops/x"])


def test_a_token_passes_its_own_experts_alone(tmp_path: Path) -> None:
    sparse = SIZES | {"num_hidden_layers": 3, "moe_intermediate_size": 5, "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(sparse | {"mlp_only_layers": [1]}))
    meter = ThroughputMeter(ModelConfig(path=str(tmp_path)), torch.device("cpu"))
    assert meter.shape.mlp_columns == 16 + 2 * (2 * 5)


def test_no_tokens_no_figure(model: ModelConfig) -> None:
    meter = ThroughputMeter(model, torch.device("cpu"))
    assert meter.training("x", torch.zeros(2, 3), epochs=1, seconds=1.0) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA L40S", 362),
        ("NVIDIA L40", 181),
        ("NVIDIA L4", 121),
        ("NVIDIA A10", 125),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H20-3e", 148),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1307.4),
        ("NVIDIA A10G", None),
        ("other", None),
    ],
)
def test_the_peak_is_of_the_device_by_its_name(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_tflops(torch.device("cuda", 0)) == peak
    assert peak_tflops(torch.device("cpu")) is None
