"""Floating-point throughput of training, and its share of what the device can do (model FLOP utilisation, MFU)."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers.utils.hub import cached_file

from rlhub.config.sections.model import ModelConfig
from rlhub.models.shape import read_model_shape

TERA = 1e12
PEAK_BF16_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
}
"""Dense bf16 peaks of the vendor's data sheets, by a part of the device's name; the first that fits."""


class ThroughputMeter:
    """Counts forward and backward of one model on one rank; gradient checkpointing's repeated work is not counted.

    ranks_per_copy: ranks that share the work on each row (tensor, pipeline and context parallel).
    """

    def __init__(self, model: ModelConfig, device: torch.device, ranks_per_copy: int = 1) -> None:
        self.ranks_per_copy = ranks_per_copy
        assert model.path is not None, "checked when the configuration is loaded"
        folder = Path(cached_file(model.path, "config.json")).parent
        self.shape = read_model_shape(folder, model.override_config)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = next((peak for part, peak in PEAK_BF16_TFLOPS.items() if part in name), None)

    def metrics(self, attention_mask: torch.Tensor, epochs: int, seconds: float) -> dict[str, float]:
        """perf/actor_tflops per rank and, where the device's peak is known, perf/mfu.  attention_mask: (rows, tokens)."""
        tokens = float(attention_mask.sum().item())
        if tokens == 0 or seconds <= 0:
            return {}
        mean_length = float(attention_mask.sum(1).double().square().sum().item()) / tokens  # weighs each token by its row
        tflops = epochs * self.shape.training_flops(int(tokens), mean_length) / self.ranks_per_copy / seconds / TERA
        return {"perf/actor_tflops": tflops} | ({"perf/mfu": tflops / self.peak} if self.peak else {})
