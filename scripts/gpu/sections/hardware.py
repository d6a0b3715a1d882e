"""Section A: what the machine itself can do, which the other sections are compared with."""

from __future__ import annotations

import torch

from rlhub.models.throughput import TERA, peak_tflops
from scripts.gpu.measure import Context, median_s

GIGA = 1e9
CALLS = 10
"""Calls in one timing, so that starting kernels does not count."""


def ceilings(context: Context) -> None:
    """Measures matrix products, copies on the device, and copies between host and device."""
    for what, figure in (("matmul", matmul), ("copy on the device", device_copy), ("copies to and from the host", host_copies)):
        with context.rows.trying(what):
            figure(context)


def matmul(context: Context) -> None:
    """Measures square matrix products, in bfloat16 on a GPU, against the device's peak in the data sheet."""
    sizes, dtype = ((4096, 8192), torch.bfloat16) if context.on_gpu else ((512,), torch.float32)
    if context.small and context.on_gpu:
        sizes = (1024,)
    peak = peak_tflops(context.device)
    for size in sizes:
        left, right = (torch.randn(size, size, device=context.device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)

        def multiply(left: torch.Tensor = left, right: torch.Tensor = right, out: torch.Tensor = out) -> None:
            for _ in range(CALLS):
                torch.mm(left, right, out=out)

        rate = CALLS * 2 * size**3 / median_s(multiply, context.device) / TERA
        name = f"matmul {str(dtype).removeprefix('torch.')} {size}"
        context.rows.measured(
            name, rate, "TFLOP/s", baseline=peak, note="" if peak is None else "baseline: the data sheet's peak"
        )


def device_copy(context: Context) -> None:
    """Measures a copy inside the device's memory; a byte that is copied is read and written."""
    size = 1 << (26 if context.small else 30)
    source = torch.empty(size, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    rate = size / median_s(copy, context.device, repeats=5) / GIGA
    context.rows.measured("copy on the device", rate, "GB/s", note="bytes copied; the memory's traffic is twice that")


def host_copies(context: Context) -> None:
    """Measures copies between host and device, from pinned and from ordinary host memory."""
    if not context.on_gpu:
        context.rows.add("copies to and from the host", status="not there", note="a CPU has no other memory")
        return
    for pinned in (True, False):
        kind = "pinned" if pinned else "ordinary"
        for direction in ("to", "from"):
            rate = host_rate(context, direction, pinned=pinned)
            context.rows.measured(f"copy {direction} the device, {kind} host memory", rate, "GB/s")


def host_rate(context: Context, direction: str, *, pinned: bool = True) -> float:
    """Returns the GB/s of a copy between host and device.  direction: "to" or "from" the device."""
    size = 1 << (24 if context.small else 30)
    on_device = torch.empty(size, dtype=torch.uint8, device=context.device)
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    target, source = (on_device, on_host) if direction == "to" else (on_host, on_device)
    return size / median_s(lambda: target.copy_(source), context.device) / GIGA
