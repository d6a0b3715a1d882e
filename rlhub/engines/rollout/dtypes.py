"""The dtype an engine holds the weights in."""

from __future__ import annotations

from typing import Literal

import torch

EngineDtype = Literal["auto", "bfloat16", "float16", "float32"]

_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(name: EngineDtype, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on accelerators and float32 on CPU, where bfloat16 arithmetic is emulated on most machines."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _TORCH_DTYPES[name]
