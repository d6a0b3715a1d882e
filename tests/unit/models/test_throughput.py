"""Throughput from counted operations: against a count by hand, and silent without work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rlhub.config.sections.model import ModelConfig
from rlhub.models.throughput import ThroughputMeter

SIZES = {
    "model_type": "qwen2",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def test_counts_weights_and_attention_per_second(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    meter = ThroughputMeter(ModelConfig(path=str(tmp_path)), torch.device("cpu"))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    per_layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16  # q, k and v, o, the three of the MLP
    weights = 2 * per_layer + 8 * 10
    attention = 6 * 2 * 2 * 4 * (4 * 4 + 2 * 2)  # layers, heads, head size, sum of squared lengths
    expected = 2 * (6 * 6 * weights + attention) / 0.5 / 1e12
    assert meter.metrics(mask, epochs=2, seconds=0.5) == {"perf/actor_tflops": pytest.approx(expected)}


def test_ranks_that_share_a_copy_share_its_work(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    model, mask = ModelConfig(path=str(tmp_path)), torch.ones(2, 3)
    alone, shared = (ThroughputMeter(model, torch.device("cpu"), ranks).metrics(mask, 1, 1.0) for ranks in (1, 4))
    assert alone["perf/actor_tflops"] == pytest.approx(4 * shared["perf/actor_tflops"])


def test_a_token_passes_its_own_experts_alone(tmp_path: Path) -> None:
    sparse = SIZES | {"num_hidden_layers": 3, "moe_intermediate_size": 5, "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(sparse | {"mlp_only_layers": [1]}))
    meter = ThroughputMeter(ModelConfig(path=str(tmp_path)), torch.device("cpu"))
    assert meter.shape.mlp_columns == 16 + 2 * (2 * 5)


def test_no_tokens_no_figure(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    meter = ThroughputMeter(ModelConfig(path=str(tmp_path)), torch.device("cpu"))
    assert meter.metrics(torch.zeros(2, 3), epochs=1, seconds=1.0) == {}


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA L40S", 362), ("NVIDIA L40", 181), ("NVIDIA H100 PCIe", 756), ("NVIDIA GH200", 989), ("other", None)],
)
def test_the_peak_is_of_the_device_by_its_name(
    name: str, peak: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert ThroughputMeter(ModelConfig(path=str(tmp_path)), torch.device("cuda", 0)).peak == peak
