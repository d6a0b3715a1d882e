"""The floating-point throughput of a model's passes, and its share of the device's peak (model FLOP utilisation, MFU).

As in PaLM (arXiv 2204.02311, section 4.1 and appendix B), only the work that the model itself needs is counted.  Padding and
the repeated passes of gradient checkpointing are not, so they lower the utilisation.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers.utils.hub import cached_file

from rlhub.config.sections.training import ModelConfig
from rlhub.models.shape import read_model_shape

TERA = 1e12
FORWARDS_OF_TRAINING = 3
"""A backward pass takes twice the operations of a forward pass."""
PEAK_BF16_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800 PCIe": 756.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L20": 119.5,
    "L4": 121.0,
    "MI300X": 1307.4,
}
"""The dense bf16 tensor-core TFLOP/s by a part of the device's name, from the vendors' data sheets (nvidia.com "<name>
datasheet", amd.com "MI300X data sheet").  If a sheet gives the figure with sparsity, this is half of it."""


def peak_tflops(device: torch.device) -> float | None:
    """Returns the dense bf16 peak of a device in TFLOP/s; None for a CPU, an unknown GPU, or a part of one (MIG)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if "MIG" in name.split():
        return None
    return next((peak for part, peak in PEAK_BF16_TFLOPS.items() if re.search(rf"\b{part}\b", name)), None)


class ThroughputMeter:
    """Measures the passes of one model on one rank.

    ranks_per_copy: the ranks that share the work on each row (tensor, pipeline and context parallel).
    head: False for a model without a language-model head (a critic).
    """

    def __init__(self, model: ModelConfig, device: torch.device, ranks_per_copy: int = 1, *, head: bool = True) -> None:
        assert model.path is not None, "checked when the configuration is loaded"
        self.ranks_per_copy, self.head = ranks_per_copy, head
        self.shape = read_model_shape(Path(cached_file(model.path, "config.json")).parent, model.override_config)
        self.peak = peak_tflops(device)

    def training(self, name: str, attention_mask: torch.Tensor, epochs: int, seconds: float) -> dict[str, float]:
        """Returns `metrics` of forward and backward passes over all rows, `epochs` times."""
        return self.metrics(name, attention_mask, FORWARDS_OF_TRAINING * epochs, seconds)

    def metrics(self, name: str, attention_mask: torch.Tensor, num_forwards: int, seconds: float) -> dict[str, float]:
        """Returns perf/tflops/<name> of this rank and, if the device's peak is known, perf/mfu/<name>; {} for a mask without a
        token.

        attention_mask: (rows, tokens) of this rank.
        """
        lengths = attention_mask.sum(1).double()
        num_tokens = lengths.sum().item()
        if num_tokens == 0 or seconds <= 0:
            return {}
        mean_length = lengths.square().sum().item() / num_tokens  # weighs each token by its row
        operations = num_forwards * self.shape.forward_flops(int(num_tokens), mean_length, head=self.head)
        tflops = operations / self.ranks_per_copy / seconds / TERA
        return {f"perf/tflops/{name}": tflops} | ({f"perf/mfu/{name}": tflops / self.peak} if self.peak else {})
