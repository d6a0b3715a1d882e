"""Section B: correctness comes first.  The tests of tests/gpu, and one gradient against plain Hugging Face in float64."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows
from rlhub.engines.training.fsdp.engine import FSDPEngine
from scripts.gpu.baselines import response_gradient
from scripts.gpu.engines import train_engine
from scripts.gpu.measure import Context, apart
from scripts.gpu.models import model_folder, shape, uneven_rows
from scripts.gpu.rows import NotThere

ROOT = Path(__file__).resolve().parents[3]
WITHIN = 1e-2
"""The largest distance of the gradient in L2, relative to that in float64."""
AGAINST_AUTOCAST = 1.5
"""The largest distance as a multiple of plain Hugging Face's in the same arithmetic."""
TESTS_SHARE = 0.6
"""The share of the section's time that the tests may take."""
NUM_ROWS, ROW_TOKENS = 6, 128
Gradient = dict[str, Tensor]


def correctness(context: Context) -> None:
    """Runs both parts."""
    with context.rows.trying("tests of tests/gpu"):
        gpu_tests(context)
    with context.rows.trying("gradient against float64"):
        gradients(context)


def gpu_tests(context: Context) -> None:
    """Runs pytest on tests/gpu and writes how many tests passed, and each that failed."""
    if not context.on_gpu:
        raise NotThere("they need a GPU")
    if find_spec("pytest") is None:
        raise NotThere("pytest is not installed")
    # The project's own options name plugins, and its conftest one more, which these tests do not need.
    options = ["-o", "addopts=", "--import-mode=importlib", "--noconftest", "-p", "no:cacheprovider", "-q", "-rfE", "--tb=short"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_SHARE * context.left_s, check=False)
    sys.stdout.write(done.stdout + done.stderr)
    for line in re.findall(r"^(?:FAILED|ERROR) (.+)$", done.stdout, re.MULTILINE):
        test, _, reason = line.partition(" - ")
        context.rows.add(test, status="failed", note=reason)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    context.rows.check("tests of tests/gpu that passed", counts.get("passed", 0), "tests", at_least=1, note=str(counts))


def gradients(context: Context) -> None:
    """Compares the training engine's gradient, and that of plain Hugging Face under autocast, with one in float64."""
    folder, limit_s = model_folder(context, "0.5B"), context.left_s
    ours, theirs = apart(gradient_distances, folder, context.device, context.small, limit_s=limit_s)
    dtype = "bfloat16" if context.on_gpu else "float32"
    what = f"gradient in {dtype}, distance from plain Hugging Face in float64"
    context.rows.check(what, ours, at_most=WITHIN, baseline=theirs, note="relative L2; baseline: Hugging Face in that dtype")
    if context.on_gpu:
        what = "the same as a multiple of plain Hugging Face's under autocast"
        context.rows.check(what, ours / theirs, "x", at_most=AGAINST_AUTOCAST)


def gradient_distances(folder: Path, device: torch.device, small: bool) -> tuple[float, float]:
    """Returns the relative distances from float64 of the engine's gradient, and of plain Hugging Face's under autocast."""
    rows = uneven_rows(NUM_ROWS, ROW_TOKENS, int(shape("0.5B", small=small)["vocab_size"]))  # type: ignore[call-overload]
    weights = (rows["advantages"] * rows["response_mask"] / rows["response_mask"].sum()).to(device)
    exact = plain_gradient(folder, rows, weights, device, torch.float64)
    ours = distance(engine_gradient(folder, rows, weights, device), exact)
    return ours, distance(plain_gradient(folder, rows, weights, device, torch.float32), exact)


def plain_gradient(folder: Path, rows: dict[str, Tensor], weights: Tensor, device: torch.device, dtype: torch.dtype) -> Gradient:
    """Returns plain Hugging Face's gradient on the CPU; in float32 a GPU computes in bfloat16 by autocast."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(device)
    half = device.type == "cuda" and dtype == torch.float32
    with torch.autocast(device.type, torch.bfloat16, enabled=half, cache_enabled=False):  # each row has a backward pass
        found = response_gradient(model, rows, weights)
    return {name: gradient.cpu() for name, gradient in found.items()}


def engine_gradient(folder: Path, rows: dict[str, Tensor], weights: Tensor, device: torch.device) -> Gradient:
    """Returns the training engine's gradient, from packed rows in several passes."""
    engine = train_engine(folder, device, max_tokens=2 * ROW_TOKENS)
    assert isinstance(engine, FSDPEngine)

    def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        assert outputs.log_probs is not None
        return LossOutput(loss=-(outputs.log_probs * micro["weights"]).sum())

    engine.forward_backward(rows | {"weights": weights.cpu()}, loss)
    return {param.name: grad.cpu() for param in engine.params if (grad := param.local_grad) is not None}


def distance(found: Gradient, exact: Gradient) -> float:
    """Returns |found - exact| / |exact| over all weights.  Raises ValueError if they are not of the same weights."""
    if found.keys() != exact.keys():
        raise ValueError(f"gradients of different weights: {sorted(found.keys() ^ exact.keys())[:4]}")
    off = sum(float((found[name].double() - exact[name].double()).square().sum()) for name in exact)
    return (off / sum(float(gradient.double().square().sum()) for gradient in exact.values())) ** 0.5
