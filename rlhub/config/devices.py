"""What this machine computes on, found without loading torch."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
from pathlib import Path

NVIDIA_SMI_DEADLINE_S = 15  # a driver in a bad state can hang the tool


@functools.cache
def count_gpus() -> int:
    """CUDA GPUs this process may use: those of the machine, cut down by CUDA_VISIBLE_DEVICES."""
    found = len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    if found == 0 and any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/dxg")):  # dxg: Windows' Linux
        found = _ask_nvidia_smi()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    named = [item for item in visible.split(",") if item.strip() not in ("", "-1")]
    return min(found, len(named))


def _ask_nvidia_smi() -> int:
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


@functools.cache
def torch_has_cuda() -> bool:
    """Whether the installed torch is a CUDA build, read from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return bool(re.search(r"^cuda\b[^=]*= *['\"]", version.read_text(), re.MULTILINE)) if version.is_file() else False
