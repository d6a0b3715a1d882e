"""The means of the sections: clocks that wait for the GPU, its memory and busy time, and calls in processes of their own."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from scripts.gpu.rows import NotThere, Recorder, described

GIB = float(1 << 30)
END_S = 20.0
"""Seconds that a process of `apart` has to end after its answer."""
MICRO = 1e-6


@dataclass(slots=True, kw_only=True, frozen=True)
class Context:
    """What a section works with.

    work: a folder for models and runs, which all sections share.
    deadline: when the section is ended, by time.monotonic.
    """

    device: torch.device
    small: bool
    work: Path
    rows: Recorder
    deadline: float

    @property
    def left_s(self) -> float:
        """Returns the seconds until the section is ended."""
        return self.deadline - time.monotonic()

    @property
    def on_gpu(self) -> bool:
        """Returns whether the section computes on a GPU."""
        return self.device.type == "cuda"


class PartError(Exception):
    """A call in a process of its own has failed; the text is its error."""


def settle(device: torch.device) -> None:
    """Waits until the GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds of one call with all GPU work that it starts."""
    settle(device)
    start = time.perf_counter()
    action()
    settle(device)
    return time.perf_counter() - start


def median_s(action: Callable[[], object], device: torch.device, *, repeats: int = 3, warm_up: int = 1) -> float:
    """Returns the median seconds of `repeats` calls, after calls that only warm up."""
    for _ in range(warm_up):
        action()
    return statistics.median(seconds_of(action, device) for _ in range(repeats))


def release(device: torch.device) -> None:
    """Gives the memory of dropped objects back to the device, and starts its peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float:
    """Returns the GiB of tensors at most at one time since `release`; on a CPU the largest RSS of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB  # Linux counts KiB


def free_bytes(device: torch.device) -> float:
    """Returns the free bytes of the device, for a CPU of the machine."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(psutil.virtual_memory().available)


def used_bytes(device: torch.device) -> float:
    """Returns the bytes in use: of the whole GPU, whose owners may be other libraries than torch, or this process's RSS."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free)
    return float(psutil.Process().memory_info().rss)


def busy_share(action: Callable[[], object], device: torch.device) -> float:
    """Returns the share of a call's time in which the GPU runs a kernel or a copy.  Raises NotThere on a CPU."""
    if device.type != "cuda":
        raise NotThere("a CPU has no kernels that run beside the program")
    settle(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        seconds = seconds_of(action, device)
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in profiled.events() or ()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]
    return covered(spans) * MICRO / seconds


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of intervals (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def apart(function: Callable[..., Any], *arguments: object, limit_s: float) -> Any:
    """Returns what `function(*arguments)` returns in a process of its own, whose GPU memory is free afterwards.

    function: found by its name in its module.  Raises PartError with the error's text, also if the process ends without an answer
    or has none after `limit_s` seconds, when it is ended.
    """
    context = multiprocessing.get_context("spawn")  # a fork would take over the CUDA state of this process
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, function, arguments))
    process.start()
    sender.close()
    grace_s = 0.0
    try:
        if not receiver.poll(max(limit_s, 1.0)):
            raise PartError(f"{function.__name__} was ended after {limit_s:.0f} s")
        grace_s = END_S
        worked, value = receiver.recv()
    except EOFError:
        process.join(END_S)
        raise PartError(f"the process of {function.__name__} ended without an answer, exit status {process.exitcode}") from None
    finally:
        _end(process, grace_s)
    if not worked:
        raise PartError(value)
    return value


def _end(process: multiprocessing.process.BaseProcess, grace_s: float) -> None:
    """Waits for the end of a process, and kills it with its children if it does not end."""
    process.join(grace_s)
    if process.is_alive() and process.pid is not None:
        for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
            one.kill()
        process.join(END_S)


def _answer(sender: Connection, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    try:
        sender.send((True, function(*arguments)))
    except Exception as error:
        sender.send((False, described(error)))
        raise
