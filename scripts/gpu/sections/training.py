"""Sections C and D: the update, the pass for log-probs, and what offloading costs, against plain Hugging Face and AdamW."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhub.algorithms.masked import Denominators
from rlhub.config.sections.actor import ActorConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig, Recompute
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows, TrainEngine
from rlhub.engines.training.collectives import check_finite
from rlhub.engines.training.updates import PolicyUpdater, count_denominators, sft_loss
from rlhub.models.packed_attention import use_flash_attention_3
from rlhub.models.shape import count_params
from rlhub.models.throughput import ThroughputMeter
from rlhub.trainer.preflight.model_bytes import bytes_of
from scripts.gpu.baselines import BareModel
from scripts.gpu.engines import train_engine
from scripts.gpu.measure import (
    GIB,
    Context,
    apart,
    busy_share,
    free_bytes,
    median_s,
    peak_gb,
    release,
    seconds_of,
    used_bytes,
)
from scripts.gpu.models import FULL, full_rows, model_folder, shape
from scripts.gpu.rows import NotThere, Skip
from scripts.gpu.sections.hardware import GIGA, host_rate

AGAINST_EAGER = 0.95
ESTIMATE_BOUND = 1.15
"""Measured memory as a multiple of the estimate, which counts matrices only."""
COMPILED = "0.5B"
"""The model whose bare loop is compiled too, which takes a minute."""
SHORTEST_S = 20.0
"""With less time left no further part is tried."""
Engine = tuple[Recompute, bool]
"""What an engine computes again in the backward pass, and whether its blocks and the head are compiled."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Job:
    """An update to measure.

    engine: what is computed again, and whether it is compiled.
    entropy: "none" does not compute it, "reported" computes it without a gradient, as a run does by default, "in the loss" too.
    """

    num_tokens: int
    engine: Engine
    entropy: str = "reported"

    @property
    def name(self) -> str:
        recompute, compiled = self.engine
        way = f"recompute {recompute}, {'compiled' if compiled else 'eager'}"
        return f"{self.num_tokens} tokens, {way}, entropy {self.entropy}"


def jobs(small: bool) -> list[Job]:
    """Returns the updates of one model, those with one engine side by side; small ones are not compiled, which takes minutes on a
    CPU."""
    half, whole = (512, 1024) if small else (8192, 16384)
    found = [Job(num_tokens=half, engine=("full", False)), Job(num_tokens=half, engine=("none", False))]
    ways: tuple[Recompute, ...] = ("full", "selective", "none")
    for engine in [(way, not small) for way in ways]:
        found += [Job(num_tokens=tokens, engine=engine) for tokens in (half, whole)]
    best: Engine = ("selective", not small)
    found += [Job(num_tokens=half, engine=best, entropy=entropy) for entropy in ("none", "in the loss")]
    return list(dict.fromkeys(found))


def update(context: Context) -> None:
    """Measures the update of each model: rlhub's, then the bare loop, eager and compiled."""
    for name in ["0.5B"] if context.small else FULL:
        with context.rows.trying(name):
            rates = _part(context, our_updates, name)
            _part(context, bare_updates, name, rates)
    fa3 = "FlashAttention 3"
    if use_flash_attention_3(context.device):
        context.rows.add(fa3, status="ok", note="the updates ran on it")
    else:
        context.rows.add(fa3, status="not there", note="the updates ran on FlashAttention 2, or on the CPU's kernels")


def _part(context: Context, function: Callable[..., Any], name: str, *arguments: object) -> Any:
    """Calls a function of this module in a process of its own, while there is time."""
    if context.left_s < SHORTEST_S:
        raise Skip(f"{context.left_s:.0f} s of the section were left")
    folder = model_folder(context, name)
    return apart(function, context, name, folder, *arguments, limit_s=context.left_s)


def rows_for(context: Context, name: str, num_tokens: int) -> dict[str, Tensor]:
    """Returns rows of that many tokens in all."""
    row_tokens = 64 if context.small else 1024
    return full_rows(num_tokens // row_tokens, row_tokens, int(shape(name, small=context.small)["vocab_size"]))  # type: ignore[call-overload]


def our_updates(context: Context, name: str, folder: Path) -> dict[str, float]:
    """Measures all updates of a model; returns tokens a second by the job's name."""
    rates: dict[str, float] = {}
    everything = jobs(context.small)
    for number, way in enumerate(dict.fromkeys(job.engine for job in everything)):
        chosen = [job for job in everything if job.engine == way]
        release(context.device)
        before = used_bytes(context.device)
        engine = train_engine(
            folder,
            context.device,
            max_tokens=max(job.num_tokens for job in chosen),
            section=FSDPConfig(recompute_granularity=way[0], use_torch_compile=way[1]),
        )
        for job in chosen:
            with context.rows.trying(f"{name}: update, {job.name}"):
                rates[job.name] = _measure(context, name, folder, engine, job)
        if number == 0:
            _memory(context, name, folder, engine, before)
        del engine
    return rates


def _measure(context: Context, name: str, folder: Path, engine: TrainEngine, job: Job) -> float:
    """Measures one update and writes its rows; returns tokens a second."""
    rows = rows_for(context, name, job.num_tokens)
    actor = ActorConfig(entropy_coeff=0.01 if job.entropy == "in the loss" else 0.0, calculate_entropy=job.entropy != "none")
    updater = PolicyUpdater(engine, actor, scale=1.0)
    norms: list[float] = []

    def step() -> None:
        norms.append(updater.update(rows, 1).get("actor/grad_norm", 0.0))
        check_finite(engine, "after the update")  # as the actor's worker does

    release(context.device)
    seconds = median_s(step, context.device, warm_up=2 if context.on_gpu else 1)
    check_gradients(norms)
    what = f"{name}: update, {job.name}"
    note = f"{throughput(folder, context.device, rows, seconds)}peak {peak_gb(context.device):.1f} GiB"
    if context.on_gpu:
        note += f", GPU busy {100 * busy_share(step, context.device):.0f} %"
    context.rows.measured(what, job.num_tokens / seconds, "tokens/s", note=note)
    return job.num_tokens / seconds


def check_gradients(norms: Sequence[float]) -> None:
    """Raises ValueError if an update that was measured had no gradient: one that computes nothing is fast."""
    if not norms or not all(norm > 0 for norm in norms):
        raise ValueError(f"gradients of the norms {norms}: the updates computed nothing")


def throughput(folder: Path, device: torch.device, rows: dict[str, Tensor], seconds: float, *, training: bool = True) -> str:
    """Returns TFLOP/s, and MFU where the device's peak is known, as words for a note."""
    meter = ThroughputMeter(ModelConfig(path=str(folder)), device)
    mask = rows["attention_mask"]
    found = meter.training("x", mask, 1, seconds) if training else meter.metrics("x", mask, 1, seconds)
    mfu = f"MFU {100 * found['perf/mfu/x']:.1f} %, " if "perf/mfu/x" in found else ""
    return f"{mfu}{found['perf/tflops/x']:.3g} TFLOP/s, "


def _memory(context: Context, name: str, folder: Path, engine: TrainEngine, before: float) -> None:
    """Compares the memory of weights, gradients and optimizer states with the estimate that is made before a run starts."""
    estimate = bytes_of(FSDPConfig(), count_params(folder), 1, True)
    expected = estimate.params + estimate.grads + estimate.states
    rows = rows_for(context, name, jobs(context.small)[0].num_tokens)
    release(context.device)

    denominators = count_denominators(engine, rows["response_mask"], 1.0)
    engine.forward_backward(rows, partial(_sft_loss, denominators))
    what = f"{name}: memory of weights, gradients and optimizer states against the estimate"
    if context.on_gpu:
        held = float(torch.cuda.memory_allocated(context.device))
        context.rows.check(
            what, held / expected, "x", at_most=ESTIMATE_BOUND, note=f"{held / GIB:.2f} of {expected / GIB:.2f} GiB"
        )
    else:
        held = used_bytes(context.device) - before
        note = f"RSS grew by {held / GIB:.3f} GiB, libraries included; the estimate is {expected / GIB:.3f} GiB"
        context.rows.measured(what, held / expected, "x", note=note)


def _sft_loss(denominators: Denominators, outputs: ForwardOutputs, micro: Rows) -> LossOutput:
    return sft_loss(outputs, micro, denominators)


def bare_updates(context: Context, name: str, folder: Path, rates: dict[str, float]) -> None:
    """Measures the bare loop at the first job's number of tokens, and compares our rates with it.

    rates: tokens a second by the job's name.
    """
    half = jobs(context.small)[0].num_tokens
    loops: list[Engine] = [("full", False), ("none", False)]
    for recompute, compiled in [*loops, ("none", True)] if name == COMPILED and not context.small else loops:
        job, kind = Job(num_tokens=half, engine=(recompute, compiled)), "compiled" if compiled else "eager"
        what = f"{name}: update, {job.name}, against bare Hugging Face, {kind}"
        with context.rows.trying(what):
            theirs = bare_update(context, name, folder, recompute == "full", compiled)
            if job.name not in rates:
                raise NotThere("our own update was not measured")
            if compiled:
                context.rows.measured(what, rates[job.name], "tokens/s", baseline=theirs)
            else:
                context.rows.compare(what, rates[job.name], "tokens/s", baseline=theirs, at_least=AGAINST_EAGER)
        release(context.device)


def bare_update(context: Context, name: str, folder: Path, checkpointing: bool, compiled: bool) -> float:
    """Returns tokens a second of the bare loop's update."""
    rows = rows_for(context, name, jobs(context.small)[0].num_tokens)
    model = BareModel(folder, context.device, checkpointing=checkpointing, compiled=compiled)
    ids, width = rows["input_ids"], rows["responses"].shape[1]

    def step() -> None:
        model.step(ids, rows["advantages"], width, rows_per_pass=len(ids))

    return ids.numel() / median_s(step, context.device, warm_up=2)


def passes(context: Context) -> None:
    """Section D: the pass for log-probs, and offloading."""
    with context.rows.trying("log-prob pass"):
        _part(context, log_prob_pass, "1.5B")
    with context.rows.trying("offloading"):
        if not context.on_gpu:
            raise NotThere("a CPU has no memory to offload from")
        _part(context, offloading, "1.5B")


def log_prob_pass(context: Context, name: str, folder: Path) -> None:
    """Measures the pass of a run's old log-probs against plain Hugging Face."""
    num_tokens = jobs(context.small)[-1].num_tokens
    rows = rows_for(context, name, num_tokens)
    ids, width = rows["input_ids"], rows["responses"].shape[1]
    seconds, found = our_log_probs(context, folder, rows)
    release(context.device)
    bare = BareModel(folder, context.device, train=False)
    half = max(len(ids) // 2, 1)  # the logits of all rows at once take gigabytes
    theirs = median_s(lambda: bare.infer(ids, width, rows_per_pass=half), context.device)
    what = f"{name}: log-prob pass of {num_tokens} tokens, against bare Hugging Face"
    note = throughput(folder, context.device, rows, seconds, training=False).removesuffix(", ")
    context.rows.compare(what, num_tokens / seconds, "tokens/s", baseline=num_tokens / theirs, at_least=AGAINST_EAGER, note=note)
    off = float((found - bare.infer(ids, width, rows_per_pass=half)).abs().mean())
    context.rows.check(f"{name}: mean distance of these log-probs from bare Hugging Face's", off, "nats", at_most=0.05)


def our_log_probs(context: Context, folder: Path, rows: dict[str, Tensor]) -> tuple[float, Tensor]:
    """Returns the median seconds of the engine's pass, and its log-probs (rows, response)."""
    engine = train_engine(folder, context.device, max_tokens=rows["input_ids"].numel(), train=False)
    seconds = median_s(lambda: engine.infer(rows, outputs=("log_probs",)), context.device)
    return seconds, engine.infer(rows, outputs=("log_probs",))["log_probs"]


def offloading(context: Context, name: str, folder: Path) -> None:
    """Measures moving weights and optimizer states to host memory and back, against pinned copies of the same bytes."""
    rows, rates = (
        rows_for(context, name, jobs(context.small)[0].num_tokens),
        (host_rate(context, "from"), host_rate(context, "to")),
    )
    section = FSDPConfig(param_offload=True, optimizer_offload=True)
    engine = train_engine(folder, context.device, max_tokens=rows["input_ids"].numel(), section=section)
    updater = PolicyUpdater(engine, ActorConfig(), scale=1.0)
    updater.update(rows, 1)
    for number in range(2):  # the first time allocates host memory
        when = "first" if number == 0 else "later"
        free = free_bytes(context.device)
        away = seconds_of(engine.offload, context.device)
        freed = free_bytes(context.device) - free
        back = seconds_of(engine.onload, context.device)
        for what, seconds, rate in (("offload the weights", away, rates[0]), ("bring them back", back, rates[1])):
            note = f"{freed / GIB:.2f} GiB, {freed / seconds / GIGA:.1f} GB/s; baseline: from or to pinned memory"
            context.rows.measured(f"{name}: {what}, {when}", seconds, "s", baseline=freed / GIGA / rate, note=note)
    offloaded = median_s(lambda: updater.update(rows, 1), context.device)
    del engine, updater
    release(context.device)
    engine = train_engine(folder, context.device, max_tokens=rows["input_ids"].numel())
    updater = PolicyUpdater(engine, ActorConfig(), scale=1.0)
    kept = median_s(lambda: updater.update(rows, 1), context.device)
    what = f"{name}: update with optimizer states in host memory"
    context.rows.measured(what, offloaded, "s", baseline=kept, note="baseline: they stay on the GPU")
