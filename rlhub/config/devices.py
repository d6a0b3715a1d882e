"""Finds this machine's GPUs and their driver without loading torch.

As a program, which scripts/setup_env.sh runs before it installs anything, it fails with the reason why the GPUs cannot be used,
or why kernels could not be compiled for them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

NVIDIA_SMI_DEADLINE_S = 15  # a driver in a bad state can hang the tool
DRIVER_DEADLINE_S = 120  # without a persistence daemon the first use starts each GPU, which takes seconds
CUDA = 13
"""Major version of the CUDA runtime in the pinned builds of torch and vLLM."""
MIN_DRIVER = 580
"""The first driver branch for it (release notes of the CUDA Toolkit 13.0)."""
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
ASK_DRIVER = """
import ctypes, sys
driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
driver.cuDriverGetVersion(ctypes.byref(version))
sys.stdout.write(f"{driver.cuInit(0)} {version.value}")
"""
"""Program that prints what cuInit returns, and the newest CUDA version of the driver's library as 1000 x major + 10 x minor."""


@functools.cache
def count_gpus() -> int:
    """Returns the number of CUDA GPUs that this process may use: the machine's, limited by CUDA_VISIBLE_DEVICES."""
    found = len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])
    if found == 0 and any(Path(name).exists() for name in ("/dev/nvidiactl", "/dev/dxg")):  # dxg: Windows' Linux
        found = sum(line.startswith("GPU ") for line in _nvidia_smi("-L"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    named = [item for item in visible.split(",") if item.strip() not in ("", "-1")]
    return min(found, len(named))


def _nvidia_smi(*arguments: str) -> list[str]:
    """Returns the lines that nvidia-smi prints; [] where it fails."""
    try:
        asked = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=NVIDIA_SMI_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return asked.stdout.splitlines() if asked.returncode == 0 else []


@functools.cache
def gpu_memory_gb() -> float | None:
    """Returns the memory in GiB of this machine's largest GPU from nvidia-smi; None where that fails."""
    sizes = [line.strip() for line in _nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")]
    return max((int(mib) / 1024 for mib in sizes if mib.isdigit()), default=None)


def driver_version() -> str | None:
    """Returns the version of the NVIDIA driver, for example 580.65.06, from nvidia-smi or the kernel module; None without one."""
    texts = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")[:1]
    texts += [KERNEL_MODULE.read_text()] if KERNEL_MODULE.is_file() else []
    found = re.search(r"\b\d{3,}(\.\d+)+\b", "\n".join(texts))
    return found.group() if found else None


@functools.cache
def driver_problem() -> str | None:
    """Returns the reason why programs for our CUDA version cannot use this machine's GPUs, and the remedy; None if they can.

    It calls the driver's own library, since a package for data centers lets old drivers run newer CUDA, and does so in another
    process, since one that has initialized CUDA must not fork.
    """
    command = [sys.executable, "-I", "-c", ASK_DRIVER]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the NVIDIA driver does not answer within {DRIVER_DEADLINE_S} s; nvidia-smi may say why, a restart may help"
    answer, version = re.fullmatch(r"(\d+) (\d+)", asked.stdout.strip()), driver_version()
    error, supported = (int(answer.group(1)), int(answer.group(2))) if answer else (None, 0)
    if error == 0 and supported >= 1000 * CUDA:
        return None
    name = f"the NVIDIA driver {version}" if version else "the NVIDIA driver"
    if 0 < supported < 1000 * CUDA or (supported == 0 and version and int(version.partition(".")[0]) < MIN_DRIVER):
        upto = f" (CUDA up to {supported // 1000}.{supported % 1000 // 10})" if supported else ""
        needed = f"builds for CUDA {CUDA} need version {MIN_DRIVER} or newer"
        return f"{name}{upto} is too old: torch's and vLLM's {needed}; update the driver"
    if error is not None:
        return f"{name} cannot be used (cuInit: error {error}); nvidia-smi may say why, after an update restart the machine"
    reason = (asked.stderr.strip().splitlines() or ["no reason given"])[-1]
    if version is None:
        return f"there is a GPU but no working NVIDIA driver ({reason}); install version {MIN_DRIVER} or newer"
    container = "a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility"
    return f"{name} is there, but its library cannot be used ({reason}); install the driver as a whole ({container})"


@functools.cache
def torch_has_cuda() -> bool:
    """Returns True where the installed torch is a CUDA build, according to its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    return bool(re.search(r"^cuda\b[^=]*= *['\"]", version.read_text(), re.MULTILINE)) if version.is_file() else False


def compiler_problem() -> str | None:
    """Returns what is missing to compile kernels at run time, as Triton does for vLLM and torch.compile, and the remedy; None if
    nothing is.

    Like Triton it takes the compiler from the variable CC, else gcc or clang, and the headers of the Python that runs it.
    """
    compilers = shlex.split(os.environ.get("CC", ""))[:1] or ["gcc", "clang"]
    lacking = [] if any(map(shutil.which, compilers)) else [f"the C compiler {' or '.join(compilers)}"]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        lacking.append("Python.h, the headers of this Python")
    if not lacking:
        return None
    packages = f"build-essential and python3.{sys.version_info.minor}-dev"
    return (
        f"{' and '.join(lacking)} not found, and GPU kernels are compiled at run time; install them (Debian, Ubuntu: {packages})"
    )


if __name__ == "__main__":
    sys.exit(driver_problem() or compiler_problem())
