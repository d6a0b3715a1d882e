"""New weights for a server while it serves: the engine's half of its administration, whichever process holds the weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open

from rlhub.engines.rollout.base import ExternalWeights, RolloutEngine, WeightBucket
from rlhub.engines.rollout.weight_stream import abbreviate, apply_buckets
from rlhub.errors import EngineError, RequestError, RlhubError
from rlhub.protocol.weights.fingerprint import nonfinite_names
from rlhub.protocol.weights.pieces import Piece
from rlhub.rollout_service.weights_folder import FolderReader, folder_reader

logger = logging.getLogger(__name__)

HEAD = "lm_head.weight"
VERSION_S = 1.0  # to wait for a version that the trainer says is there


class EngineAdministration:
    """Of one engine; see `Administration`.  Calls that block run in a thread, one after the other."""

    def __init__(self, engine: RolloutEngine, *, recompute: bool, bucket_bytes: int) -> None:
        self._engine, self._recompute, self._bucket_bytes = engine, recompute, bucket_bytes
        self._turn = asyncio.Lock()
        self._paused = False
        self._unsound = False  # writing has failed half-way: the engine stays paused until it has whole weights
        self._readers: dict[str, FolderReader] = {}

    @property
    def paused(self) -> bool:
        """Whether it was asked to, by `pause`."""
        return self._paused

    @property
    def failure(self) -> str:
        """Why the engine stays paused until whole weights come; "" where it does not."""
        return "its weights are half-written: publish whole ones at /admin/weights" if self._unsound else ""

    async def pause(self) -> None:
        async with self._turn:
            await asyncio.to_thread(self.hold)

    def hold(self) -> None:
        """As `pause`, and blocking."""
        self._engine.pause()
        self._paused = True

    async def resume(self, *, recompute: bool) -> None:
        async with self._turn:
            self._paused = False
            await asyncio.to_thread(self._engine.resume, recompute=recompute and self._recompute)

    async def reload(self, folder: str, version: int) -> dict[str, Any]:
        """RequestError, and nothing was changed, for a folder that cannot be used; EngineError where writing failed half-way."""
        async with self._turn:
            await asyncio.to_thread(self.take, Path(folder), version)
        logger.info("version %d from %s", version, folder)
        return await self.status()

    async def status(self) -> dict[str, Any]:
        return {"version": self._engine.version, "load": self._engine.load, "paused": self._paused or self._unsound}

    def take(self, folder: Path, version: int) -> None:
        """As `reload`, and blocking.  From a Hugging Face folder, or from that of a trainer's WeightWriter."""
        try:
            write = self._prepared(folder, version)
        except (RlhubError, OSError, ValueError) as error:  # ValueError: no path at all
            raise RequestError(f"{error}; nothing was changed", param="folder") from error
        self._engine.pause()
        self._unsound = True
        write()
        self._unsound = False
        if not self._paused:
            self._engine.resume(recompute=self._recompute)

    def _prepared(self, folder: Path, version: int) -> Callable[[], object]:
        """All that can fail without harm is done; the rest is for the paused engine."""
        if any(folder.glob("*.safetensors")):
            return self._from_model(folder, version)
        if any(folder.glob("version-*")):
            reader = self._reader(folder)
            return partial(reader.place, reader.prepare(version))
        raise EngineError(f"no weights in {folder}: neither *.safetensors files nor version-<n> folders")

    def _from_model(self, folder: Path, version: int) -> Callable[[], object]:
        engine = self._engine
        if isinstance(engine, ExternalWeights):
            target = f"{__name__}:{WorkerFolder.__name__}"
            engine.call_workers(target, "check", str(folder))

            def write() -> None:
                with engine.overwriting(version):
                    engine.call_workers(target, "load", str(folder), version)

            return write
        return partial(engine.update_weights, fitting_buckets(folder, engine), version)

    def _reader(self, folder: Path) -> FolderReader:
        if str(folder) not in self._readers:
            made = folder_reader(self._engine, folder, bucket_bytes=self._bucket_bytes, timeout_s=VERSION_S)
            self._readers[str(folder)] = made
        return self._readers[str(folder)]


class Weights(Protocol):
    """An engine's, or those of one worker of it; see RolloutEngine."""

    def live_weights(self) -> Iterator[Piece]: ...

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None: ...


class WorkerFolder:
    """Reads a Hugging Face folder in each worker of an engine with external weights."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def check(self, folder: str) -> None:
        """EngineError where it cannot be read or is another model's."""
        fitting_buckets(Path(folder), self._weights)

    def load(self, folder: str, version: int) -> None:
        """While the engine is paused."""
        self._weights.update_weights(fitting_buckets(Path(folder), self._weights), version)


def fitting_buckets(folder: Path, weights: Weights) -> list[WeightBucket]:
    """What `update_weights` takes.  EngineError where names or shapes are not those of the engine, or weights are not finite:
    nothing is written then."""
    shapes = {piece.name: tuple(piece.shape) for piece in weights.live_weights()}

    def compare(bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            if tuple(tensor.shape) != shapes[name]:
                raise EngineError(f"{name} has shape {tuple(tensor.shape)}, and {shapes[name]} in the engine")

    buckets = without_tied_head(read_buckets(folder), weights)
    try:
        apply_buckets(buckets, shapes, compare)
    except EngineError as error:
        raise EngineError(f"the weights in {folder} are another model's, and nothing was changed: {error}") from error
    if found := nonfinite_names(entry for bucket in buckets for entry in bucket):
        raise EngineError(f"weights in {folder} are not finite, and nothing was changed: {abbreviate(found)}")
    return buckets


def read_buckets(folder: Path) -> list[WeightBucket]:
    """A file is a bucket.  Tensors are mapped: the files are read when these are copied.  EngineError if they cannot be."""
    try:
        return [_bucket(file) for file in sorted(folder.glob("*.safetensors"))]
    except (OSError, SafetensorError) as error:
        raise EngineError(f"the weights in {folder} cannot be read: {error}") from error


def _bucket(file: Path) -> WeightBucket:
    with safe_open(file, framework="pt") as opened:
        return [(name, opened.get_tensor(name)) for name in opened.keys()]


def without_tied_head(buckets: list[WeightBucket], weights: Weights) -> list[WeightBucket]:
    """A folder may name a tied head besides its embedding; an engine has the two once."""
    if any(piece.name == HEAD for piece in weights.live_weights()):
        return buckets
    return [[(name, tensor) for name, tensor in bucket if name != HEAD] for bucket in buckets]
