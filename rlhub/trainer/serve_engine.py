"""The engine behind a server's endpoint: it generates, takes new weights while it serves, and is rebuilt when it has failed.

This is the engine's half of the server's administration, whichever process holds the weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

from safetensors import SafetensorError, safe_open

from rlhub.agents.openai_server.errors import unavailable
from rlhub.engines.rollout.base import (
    Completion,
    ExternalWeights,
    Follow,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    WeightBucket,
    abbreviate,
    apply_buckets,
)
from rlhub.errors import EngineError, RequestError, RlhubError, VersionError
from rlhub.protocol.weights.fingerprint import nonfinite_names
from rlhub.protocol.weights.pieces import Piece
from rlhub.rollout_service.weights_folder import FolderReader, folder_reader

logger = logging.getLogger(__name__)


HEAD = "lm_head.weight"
VERSION_S = 1.0  # to wait for a version that the trainer says is there


class EngineAdministration:
    """The `Administration` of one engine.  Calls that block run in a thread, one after the other."""

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


LOOK_S = 1.0  # between two looks at an engine that nobody asks


@dataclass(slots=True, kw_only=True, frozen=True)
class ServeLimits:
    """recompute, bucket_bytes: of weight updates.  rebuilds: how often the engine is built anew in a row, without an answer in
    between."""

    recompute: bool
    bucket_bytes: int
    rebuilds: int


@dataclass(slots=True, kw_only=True, frozen=True)
class _Taken:
    """Weights that were published.  files: names, sizes and times, by which the folder is known again."""

    folder: Path
    version: int
    files: tuple[tuple[str, int, int], ...]


class ServedEngine:
    """See the module docstring.  Implements `EpisodeEngine` and `Administration`; all but `shutdown` on one event loop.

    build: an engine that is ready, with the weights of the model's files.
    """

    def __init__(self, build: Callable[[], RolloutEngine], limits: ServeLimits) -> None:
        self._build, self._limits = build, limits
        self._engine, self._admin = self._built()
        self._version = self._engine.version
        self._taken: _Taken | None = None
        self._lost = ""  # why there is no engine with the weights it should have
        self._failed = ""  # why the engine, or building another, has
        self._rebuilt = 0
        self._turn = asyncio.Lock()
        self._doubt = asyncio.Event()

    def _built(self) -> tuple[RolloutEngine, EngineAdministration]:
        engine, limits = self._build(), self._limits
        return engine, EngineAdministration(engine, recompute=limits.recompute, bucket_bytes=limits.bucket_bytes)

    # --- generation ----------------------------------------------------------------------------------------------------

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """One completion.  ApiError 503 while there is no engine that can."""
        if broken := self._lost or self._engine.failure:
            self._doubt.set()
            raise unavailable(broken)
        try:
            completion = await self._engine.agenerate(request, params, follow)
        except RequestError:
            raise
        except EngineError:
            self._doubt.set()
            raise
        self._rebuilt = 0
        return completion

    @property
    def failure(self) -> str:
        """Why nothing can be generated now; "" while it can."""
        return self._lost or self._engine.failure or self._admin.failure

    async def watch(self) -> NoReturn:
        """Look after the engine, and build it anew when it has failed.  EngineError where that has failed too often."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._doubt.wait(), LOOK_S)
            self._doubt.clear()
            async with self._turn:
                await self._mend()

    # --- administration ------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        async with self._turn:
            await self._mend()
            await self._admin.pause()

    async def resume(self, *, recompute: bool) -> None:
        async with self._turn:
            await self._mend()
            await self._admin.resume(recompute=recompute)

    async def reload(self, folder: str, version: int, *, reset_version: bool) -> dict[str, Any]:
        async with self._turn:
            if version <= self._version and not reset_version:
                raise VersionError(
                    f"version {version} is not newer than version {self._version}, which the engine has: count on from there, or "
                    "send reset_version=true where another run begins"
                )
            await self._mend()
            files = await asyncio.to_thread(_files, folder)
            await self._admin.reload(folder, version)
            self._version, self._lost = version, ""
            self._taken = _Taken(folder=Path(folder), version=version, files=files)
        return await self.status()

    async def status(self) -> dict[str, Any]:
        return {**await self._admin.status(), "version": self._version, "failure": self.failure}

    # --- failing -------------------------------------------------------------------------------------------------------

    async def _mend(self) -> None:
        """Build the engine anew if it has failed; the caller has the turn."""
        self._failed = self._engine.failure or self._failed
        while self._failed:
            if self._rebuilt >= self._limits.rebuilds:
                self._lost = (
                    f"it failed, after it was built anew {self._rebuilt} times (rollout.replica_restarts): {self._failed}"
                )
                raise EngineError(f"the engine cannot be mended: {self._lost}")
            self._rebuilt += 1
            self._lost = f"it failed and is built anew: {self._failed}"
            logger.error("the engine: %s", self._lost)
            try:
                self._lost = await asyncio.to_thread(self._replace)
            except Exception as error:  # noqa: BLE001  whatever building an engine raises: it is tried again, and then told
                self._failed = f"{type(error).__name__}: {error}"
            else:
                self._failed = self._engine.failure
                logger.info("the engine was built anew")

    def _replace(self) -> str:
        """Why the new engine has not the weights that it should have; "" if it has."""
        paused = self._admin.paused
        self._engine.shutdown()
        self._engine, self._admin = self._built()
        if paused:
            self._admin.hold()
        taken = self._taken
        if taken is None:
            return ""
        try:
            if _files(taken.folder) != taken.files:
                raise RequestError("the files are others now")
            self._admin.take(taken.folder, taken.version)
        except EngineError as error:
            logger.error("version %d cannot be read again from %s: %s", taken.version, taken.folder, error)
            return (
                f"it was built anew, and version {taken.version} cannot be read again from {taken.folder} ({error}): publish a "
                "newer version at /admin/weights"
            )
        return ""

    def shutdown(self) -> None:
        """End the engine.  Idempotent."""
        self._engine.shutdown()


def _files(folder: str | Path) -> tuple[tuple[str, int, int], ...]:
    """Returns name, size and time of a Hugging Face folder's weight files; nothing for a trainer's own folder, whose versions are
    numbered."""
    try:
        found = [(file.name, file.stat()) for file in sorted(Path(folder).glob("*.safetensors"))]
    except (OSError, ValueError) as error:
        raise RequestError(f"the folder cannot be read: {error}", param="folder") from error
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
