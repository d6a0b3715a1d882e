"""Reads the sizes of the models that a job names: of local folders, before any process starts and without torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.shape import ModelShape, read_model_shape
from rlhub.models.weight_files import file_problems

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # "gpt2" or "Qwen/Qwen2.5-0.5B"


def check_length(shape: ModelShape, length: int, arithmetic: str, key: str) -> list[str]:
    """Returns the problem of a longest sequence that exceeds the model's positions; [] if it fits.

    arithmetic: how `length` follows from settings.  key: key of the model's section.
    """
    if 0 < shape.max_positions < length:
        return [f"{arithmetic} tokens, but {key} has {shape.max_positions} positions (max_position_embeddings)"]
    return []


def read_shape(model: ModelConfig, key: str, problems: list[str]) -> ModelShape | None:
    """Returns the sizes of a model in a local folder, else None, and appends what is wrong to `problems`.

    A model of the hub is checked when it is loaded.
    """
    if not model.path:
        return None
    path = Path(model.path).expanduser()
    if path.is_dir():
        problems += [f"{key}.path={model.path}: {text}" for text in file_problems(path)]
        try:
            return read_model_shape(path, model.override_config)
        except ConfigError as error:
            problems += [f"{key}.path={model.path}: {text}" for text in error.problems]
    elif not HUB_NAME.fullmatch(model.path) or path.exists():
        problems.append(f"{key}.path={model.path}: no such folder (looked for {path.resolve()})")
    elif os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "TRUE", "YES", "ON") and not _is_cached(model.path):
        problems.append(f"{key}.path={model.path}: no such folder, and not in the hub's cache while HF_HUB_OFFLINE is set")
    return None


def _is_cached(name: str) -> bool:
    """Returns True for a model in huggingface_hub's cache, as the folder models--<owner>--<name>/snapshots."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")).expanduser()
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return (cache / f"models--{name.replace('/', '--')}" / "snapshots").is_dir()
