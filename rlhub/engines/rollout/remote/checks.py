"""Checks of actor_rollout_ref.rollout.remote before any process starts; loads no torch."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from rlhub.config.sections.rollout import RemoteConfig, RolloutConfig

KEY = "actor_rollout_ref.rollout.remote"
EVALUATION_ONLY = ("openai",)
"""Servers whose dialect has `trains` False."""


def remote_problems(config: RolloutConfig, *, trains: bool) -> list[str]:
    """Returns sentences on the servers' addresses, their key and, where the job `trains`, how they get its weights."""
    remote = config.remote
    problems = [
        f"{KEY}.urls: {url!r} is no address; expected http://host:port or https://host:port"
        for url in remote.urls
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc
    ]
    if not remote.urls:
        problems.append(
            f"{KEY}.urls is not set, but actor_rollout_ref.rollout.name={config.name}: name the servers, for example "
            "[http://host:8000] (python -m rlhub.trainer.main_serve starts one)"
        )
    keys = [*_key_problems("api_key_file", remote.api_key_file), *_key_problems("admin_key_file", remote.admin_key_file)]
    return [*problems, *keys, *(_weight_problems(remote) if trains else ())]


def most_replicas(config: RolloutConfig) -> int:
    """Returns one replica a server: it has one version of the weights at a time, and pauses for all its requests."""
    return max(len(set(config.remote.urls)), 1)


def _key_problems(setting: str, file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return [f"{KEY}.{setting}={file} cannot be read ({error}); name the file from which the servers have their key"]
    return [] if text.strip() else [f"{KEY}.{setting}={file} is empty; write the servers' key to it"]


def _weight_problems(remote: RemoteConfig) -> list[str]:
    problems = []
    if remote.server in EVALUATION_ONLY:
        problems.append(
            f"{KEY}.server={remote.server} gives no token ids, so it serves evaluation only (rlhub.trainer.main_eval); to train "
            "set rlhub, vllm or sglang"
        )
    if remote.weights_folder is None:
        problems.append(
            f"{KEY}.weights_folder is not set: the servers get new weights through it; name a folder that this job and the "
            "servers reach under the same path"
        )
        return problems
    folder = Path(remote.weights_folder).expanduser().absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problems.append(f"{KEY}.weights_folder={remote.weights_folder}: {existing} is not a folder we may write to; name another")
    return problems
