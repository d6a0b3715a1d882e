"""The engine behind a server's endpoint: it generates, it is administered, and when it has failed it is built anew."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rlhub.agents.openai_server.errors import unavailable
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, RolloutEngine, SamplingParams
from rlhub.errors import EngineError, RequestError, VersionError
from rlhub.trainer.serve_weights import EngineAdministration

logger = logging.getLogger(__name__)

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
    """Of a Hugging Face folder's weights; none of a trainer's own folder, whose versions know themselves."""
    try:
        found = [(file.name, file.stat()) for file in sorted(Path(folder).glob("*.safetensors"))]
    except (OSError, ValueError) as error:
        raise RequestError(f"the folder cannot be read: {error}", param="folder") from error
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)
