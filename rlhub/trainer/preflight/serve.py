"""Checks a server's names, model, devices, address and files before its engine is built.  It loads no model."""

from __future__ import annotations

import os
import socket
from collections.abc import Set as AbstractSet
from dataclasses import replace
from pathlib import Path

from rlhub.config.devices import count_gpus, driver_problem, torch_has_cuda
from rlhub.config.names import unknown
from rlhub.config.sections.serve import MAX_PORT, ServeConfig, ServerConfig, problems
from rlhub.engines.rollout.registry import ROLLOUT_ENGINES, model_problems, resolve_engine_name
from rlhub.tools.registry import reply_problems
from rlhub.trainer.preflight.checks import import_plugins
from rlhub.trainer.preflight.model_folders import check_length, read_shape

TRAINING_PREFIX = "actor_rollout_ref."
"""Prefix of the keys that engines name; the server's configuration has the section at its root."""


def check(config: ServeConfig, set_keys: AbstractSet[str]) -> list[str]:
    """Returns the problems of a server's configuration; [] if it can start.  set_keys: the keys that the user set."""
    plugins = [problem.removeprefix("trainer.") for problem in import_plugins(config.plugins)]
    engine = resolve_engine_name(config.rollout.name)
    misnamed = unknown("rollout.name", ROLLOUT_ENGINES, engine)
    misnamed += reply_problems("server.tool_format", config.server.tool_format, config.server.reasoning_parser)
    found = [*problems(config, set_keys), *plugins, *misnamed, *_model_problems(config), *_engine_problems(config, engine)]
    return [*found, *_device_problems(config), *_address_problems(config.server), *_file_problems(config.server)]


def _model_problems(config: ServeConfig) -> list[str]:
    found: list[str] = []
    shape, length = read_shape(config.model, "model", found), config.rollout.max_model_len
    if shape is not None and length is not None:
        found += check_length(shape, length, f"rollout.max_model_len={length}", "model")
    return found


def _engine_problems(config: ServeConfig, name: str) -> list[str]:
    judge = ROLLOUT_ENGINES.companion(name, "problems") if name in ROLLOUT_ENGINES else None
    found: list[str] = judge(replace(config.rollout, mode="async"), trains=False) if judge is not None else []
    if config.rollout.quantization:
        found.append(
            f"rollout.quantization={config.rollout.quantization}: only weights of a trainer are quantized; set it to null"
        )
    found = [problem.replace(TRAINING_PREFIX, "") for problem in found]
    return [*found, *model_problems(name, config.model, where="rollout.name")]


def _device_problems(config: ServeConfig) -> list[str]:
    size, gpus = config.rollout.tensor_model_parallel_size, count_gpus()
    if config.device == "cuda" and not gpus:
        return ["device=cuda: no GPU found on this machine; device=cpu serves without"]
    if config.device == "cuda" and not torch_has_cuda():
        return ["device=cuda: the installed torch is a CPU build: make the environment on a GPU machine"]
    if config.device == "cpu" or not gpus or not torch_has_cuda():
        return []
    if problem := driver_problem():
        return [f"device={config.device}: {problem}; device=cpu serves without"]
    if size <= gpus:
        return []
    return [f"rollout.tensor_model_parallel_size={size}: this machine has {gpus} GPUs; set it to at most that"]


def _address_problems(server: ServerConfig) -> list[str]:
    """Binds the address for a moment, so that a port in use is found before a model loads for minutes."""
    if server.port > MAX_PORT:
        return []  # a problem of its own
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return [
            f"server.host={server.host}: {error.strerror or error}; 127.0.0.1 is this machine alone, 0.0.0.0 all its addresses"
        ]
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do, after one that has just ended
        try:
            tried.bind(address)
        except OSError as error:
            where = f"server.host={server.host}, server.port={server.port}: cannot listen there ({error.strerror or error})"
            return [f"{where}; set another port, or 0 for any free one, or host=127.0.0.1"]
    return []


def _file_problems(server: ServerConfig) -> list[str]:
    """Returns the problems of files that can be neither created nor read."""
    found = []
    for key, file in (
        ("api_key_file", server.api_key_file),
        ("admin_key_file", server.admin_key_file),
        ("ready_file", server.ready_file),
    ):
        if file is None:
            continue
        path = Path(file).expanduser()
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.R_OK | os.W_OK):
            found.append(f"server.{key}={file}: {path.absolute()} is not a file we may make or read")
    return found
