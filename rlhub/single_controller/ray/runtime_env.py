"""A Ray runtime environment that can be shipped: the source tree without what is large, local or secret."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

EXCLUDES = (
    ".git", ".venv*", "venv", "checkpoints", "outputs", "wandb", "logs", "__pycache__", "*.egg-info",
    ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "*.safetensors", "*.bin", "*.parquet", ".env",
)  # fmt: skip
"""gitignore patterns.  Data and weights are read from paths that all nodes see, not shipped with the code."""


def build_runtime_env(working_dir: str | Path, env_vars: Mapping[str, str] | None = None) -> dict[str, Any]:
    """For `ray.init(runtime_env=...)` or job submission on several nodes that share no source tree.

    A single machine needs none: its workers import what the driver imports.
    """
    return {"working_dir": str(working_dir), "excludes": list(EXCLUDES), "env_vars": dict(env_vars or {})}
