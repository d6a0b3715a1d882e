"""What cannot work about a server, found before any engine is built: names, the engine's own part, devices.  Loads no model."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from rlhub.config.devices import count_gpus, torch_has_cuda
from rlhub.config.serve import ServeConfig, problems
from rlhub.engines.rollout.registry import ROLLOUT_ENGINES, resolve_engine_name
from rlhub.registry import Registry
from rlhub.tools.registry import TOOL_FORMATS
from rlhub.trainer.preflight import import_plugins, unknown

TRAINING_PREFIX = "actor_rollout_ref."
"""Of the keys that engines name: here the section stands at the root."""


def check(config: ServeConfig, set_keys: AbstractSet[str]) -> list[str]:
    """Sentences; [] if it may start."""
    plugins = [problem.removeprefix("trainer.") for problem in import_plugins(config.plugins)]
    engine = resolve_engine_name(config.rollout.name)
    names: list[tuple[str, Registry[Any], str]] = [
        ("rollout.name", ROLLOUT_ENGINES, engine),
        ("server.tool_format", TOOL_FORMATS, config.server.tool_format),
    ]
    misnamed = [problem for key, registry, name in names for problem in unknown(key, registry, name)]
    return [*problems(config, set_keys), *plugins, *misnamed, *_of_engine(config, engine), *_of_devices(config)]


def _of_engine(config: ServeConfig, name: str) -> list[str]:
    judge = ROLLOUT_ENGINES.companion(name, "problems") if name in ROLLOUT_ENGINES else None
    found: list[str] = judge(replace(config.rollout, mode="async"), trains=False) if judge is not None else []
    return [problem.replace(TRAINING_PREFIX, "") for problem in found]


def _of_devices(config: ServeConfig) -> list[str]:
    size, gpus = config.rollout.tensor_model_parallel_size, count_gpus()
    if config.device == "cpu" or not gpus or not torch_has_cuda() or size <= gpus:
        return []
    return [f"rollout.tensor_model_parallel_size={size}: this machine has {gpus} GPUs; set it to at most that"]
