"""What vLLM's worker processes carry of ours: weights that can be written again, a way in for who writes them, and an end.

vLLM imports this in each worker before it builds the model (`worker_extension_cls`).  The workers end with the process that
owns the engine, however that ends: vLLM's engine core, between the two, would otherwise wait for requests for ever.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn

from rlhub.engines.rollout.base import WeightBucket
from rlhub.engines.rollout.vllm.arguments import keep_weights_unpacked
from rlhub.engines.rollout.vllm.environment import owner_process
from rlhub.engines.rollout.vllm.weights import live_weights
from rlhub.engines.rollout.weight_stream import apply_buckets
from rlhub.errors import RlhubError
from rlhub.utils.pieces import Piece

WATCH_S = 0.5
GRACE_S = 5.0  # for the engine core to take its shared memory along


class WorkerWeights:
    """The weights of this worker's part of the model, as a weight reader sees an engine's.

    Whoever writes them has paused the engine; its version and readiness are kept where the engine is.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._dtypes = {piece.name: piece.tensor.dtype for piece in self.live_weights()}

    def live_weights(self) -> Iterator[Piece]:
        return live_weights(self._model)

    @torch.no_grad()
    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        """By vLLM's own loader, each worker taking its part."""
        apply_buckets(buckets, self._dtypes, lambda bucket: self._model.load_weights(iter(bucket)))

    @contextmanager
    def overwriting(self, version: int) -> Iterator[None]:
        yield

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Nothing sleeps."""


class WorkerExtension:
    """Mixed into vLLM's worker class; its method can be called by collective_rpc."""

    def rlhub_call(self, target: str, method: str, arguments: bytes) -> bytes:
        """Call a method of this worker's object of the class `target` (module:Class), built from WorkerWeights on first use."""
        try:
            value = getattr(self._rlhub_object(target), method)(*pickle.loads(arguments))
        except RlhubError as error:
            return pickle.dumps((None, error))
        return pickle.dumps((value, None))

    def _rlhub_object(self, target: str) -> Any:
        objects: dict[str, Any] = self.__dict__.setdefault("_rlhub_objects", {})
        if target not in objects:
            module, _, name = target.partition(":")
            factory: Callable[[WorkerWeights], Any] = getattr(importlib.import_module(module), name)
            objects[target] = factory(WorkerWeights(self.model_runner.model))  # type: ignore[attr-defined]
        return objects[target]


def end_with(owner: psutil.Process) -> None:
    """Watch the process that owns the engine, from a thread; when it is gone, end the engine core and this process."""
    parent = os.getppid()
    core = os.getpid() if parent == owner.pid else parent
    threading.Thread(target=_watch, args=(owner, core), name="owner-watch", daemon=True).start()


def _watch(owner: psutil.Process, core: int) -> None:
    while _lives(owner):
        time.sleep(WATCH_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if core in (os.getpid(), os.getppid()):  # else it has ended, and its number may be another's
            os.kill(core, number)
        time.sleep(GRACE_S)
    os._exit(1)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if (owner := owner_process()) is not None:
    keep_weights_unpacked()
    end_with(owner)
