"""Linear layers that store their matrix in eight bits and compute with the matrix that these stand for.

No kernel is needed, so this runs on every device: the matrix is dequantized for each product, which costs time and saves three
quarters of the weights' memory in float32.  Of the model the projections of attention and MLP are such layers; embedding, head,
norms and biases stay as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlhub.protocol.weights.fp8 import FP8, dequantize, num_blocks, quantize


class Fp8Linear(nn.Module):
    """A linear layer x -> x W^T + b with W (out, in) in eight bits; see protocol.weights.fp8.  Its parameters have the names of
    the weight and its scales in a checkpoint."""

    def __init__(self, linear: nn.Linear, *, quantized: bool) -> None:
        """Takes the place of a layer.  quantized: False leaves the weight undefined until the first update."""
        super().__init__()
        rows, columns = linear.weight.shape
        if quantized:
            weight, scales = quantize(linear.weight.detach())
        else:
            weight = torch.empty(rows, columns, dtype=FP8, device=linear.weight.device)
            scales = torch.empty(num_blocks(rows), num_blocks(columns), device=linear.weight.device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, dequantize(self.weight, self.weight_scale_inv, x.dtype), self.bias)


def quantize_projections(model: nn.Module, *, quantized: bool) -> None:
    """Puts an Fp8Linear in the place of every projection.  quantized: as in Fp8Linear."""
    found = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and path.endswith("_proj")]
    for path, layer in found:
        model.set_submodule(path, Fp8Linear(layer, quantized=quantized))
