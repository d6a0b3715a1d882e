"""What rlhub adds to vLLM's worker processes: weights that can be written again, and calls for whoever writes them.

vLLM imports this in each worker before it builds the model (`worker_extension_cls`).
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlhub.engines.rollout.base import WeightBucket, apply_buckets
from rlhub.engines.rollout.vllm.environment import end_with_owner, owner_pid
from rlhub.engines.rollout.vllm.internals import keep_weights_unpacked
from rlhub.engines.rollout.vllm.weights import live_weights, load_weights
from rlhub.errors import RlhubError
from rlhub.models.required_weights import refuse_nonfinite
from rlhub.protocol.weights.pieces import Piece


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
        """Writes a whole stream of full tensors, of which each worker takes its part."""
        apply_buckets(buckets, self._dtypes, lambda bucket: load_weights(self._model, bucket))

    @contextmanager
    def overwriting(self, version: int) -> Iterator[None]:
        yield

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Does nothing: nothing sleeps."""


class LoadedWeights:
    """In each worker, a check of what it has loaded from the model's folder."""

    def __init__(self, weights: WorkerWeights) -> None:
        self._weights = weights

    def check(self, path: str) -> None:
        """Raises ConfigError for weights that are not finite."""
        refuse_nonfinite(path, ((piece.name, piece.tensor) for piece in self._weights.live_weights()))


class WorkerExtension:
    """Mixed into vLLM's worker class; its method can be called by collective_rpc."""

    def rlhub_call(self, target: str, method: str, arguments: bytes) -> bytes:
        """Calls a method of this worker's object of the class `target` (module:Class), built from WorkerWeights on first use."""
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
            objects[target] = factory(WorkerWeights(self.get_model()))  # type: ignore[attr-defined]
        return objects[target]


if owner_pid() is not None:
    keep_weights_unpacked()
    end_with_owner()
