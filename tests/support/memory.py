"""The bytes that tensors take, counted by torch's profiler: resident memory would measure the C library's allocator."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

CPU_DEVICE = 0  # the number of its type in a trace


def peak_allocation(action: Callable[[], object]) -> int:
    """Returns the most bytes that tensors on the CPU took at once during the action, above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    of_memory = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == CPU_DEVICE]
    changes = [event["args"]["Bytes"] for event in sorted(of_memory, key=lambda event: float(event["ts"]))]
    return max(accumulate(changes, initial=0))
