"""Whether what was installed is what was meant, and works here: run by setup_env.sh with the environment's Python.

python scripts/check_environment.py cpu|cuda [here] [any-build]

here: the GPUs are in this machine, so torch must be able to use them.  any-build: a CUDA build of torch will do without a GPU.
"""

from __future__ import annotations

import importlib
import sys

import torch

PACKAGES = ("ray", "transformers", "tensordict", "hydra", "peft", "pyarrow", "math_verify", "vllm", "rlhub")


def torch_problem(platform: str, here: bool, any_build: bool) -> str | None:
    """What is wrong with torch, and what to do."""
    anew = "remove the environment and give --torch-index URL"
    if platform == "cpu":
        wrong = torch.version.cuda and not any_build
        return f"torch {torch.__version__} is a CUDA build, this is to be a CPU environment: {anew}" if wrong else None
    if not torch.version.cuda:
        return f"torch {torch.__version__} is a CPU build, this machine has a GPU: {anew}"
    if not here or torch.cuda.is_available():
        return None
    try:
        torch.empty(1, device="cuda")
        reason = "torch.cuda.is_available() is False"
    except RuntimeError as error:
        reason = str(error)
    return (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} cannot use this machine's GPU: {reason}\n  Update or repair "
        "the NVIDIA driver (nvidia-smi says what it is) and run this again, or compute on CPU: RLHUB_PLATFORM=cpu"
    )


if __name__ == "__main__":
    problem = torch_problem(sys.argv[1], "here" in sys.argv[2:], "any-build" in sys.argv[2:])
    if problem:
        sys.exit(f"[setup] error: {problem}")
    for name in PACKAGES:
        importlib.import_module(name)
