"""The server process: an engine that holds a model, the endpoint over it, and new weights while it serves.

§§ serve_engine: The engine behind a server's endpoint: it generates, takes new weights while it serves, and is rebuilt when it has failed.

This is the engine's half of the server's administration, whichever process holds the weights.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from safetensors import SafetensorError, safe_open

from rlhub.agents.openai_server.admin import Administration
from rlhub.agents.openai_server.errors import unavailable
from rlhub.agents.openai_server.server import OpenAIServer, ServerOptions
from rlhub.config.devices import count_gpus, torch_has_cuda
from rlhub.config.sections.serve import ServeConfig
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
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.errors import ConfigError, EngineError, RequestError, RlhubError, VersionError
from rlhub.models.shape import read_model_shape
from rlhub.models.tokenizer import check_tokenizer, load_tokenizer, read_vocabulary
from rlhub.protocol.weights.fingerprint import nonfinite_names
from rlhub.protocol.weights.pieces import Piece
from rlhub.rollout_service.weights_folder import FolderReader, folder_reader
from rlhub.tools.registry import TOOL_FORMATS
from rlhub.utils.atomic import write_text

logger = logging.getLogger(__name__)


DEFAULT_MODEL_LEN = 8192
"""Bound where neither the settings nor the model name one."""
KEY_BYTES = 32
INITIAL_VERSION = 0


def serve(config: ServeConfig) -> int:
    """Until SIGINT or SIGTERM; the exit status is 0."""
    check_tokenizer(config.model)
    rollout = config.rollout
    limits = ServeLimits(
        recompute=rollout.recompute_kv_cache,
        bucket_bytes=rollout.update_weights_bucket_mb << 20,
        rebuilds=rollout.replica_restarts,
    )
    engine = ServedEngine(partial(build_engine, config), limits)
    try:
        return asyncio.run(_serve(config, engine))
    finally:
        engine.shutdown()


async def _serve(config: ServeConfig, engine: ServedEngine) -> int:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    key = read_key("api_key_file", config.server.api_key_file)
    server = build_server(config, engine, key, read_key("admin_key_file", config.server.admin_key_file))
    address = await server.start()
    logger.info("serving %s at %s/v1", config.model.path, address)
    if config.server.ready_file is not None:
        write_text(Path(config.server.ready_file).expanduser(), address)
    watching = asyncio.create_task(engine.watch())
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
    logger.info("stopping")
    await server.aclose()
    if watching.done():
        watching.result()  # raises why the engine cannot be mended
    watching.cancel()
    return 0


def build_engine(config: ServeConfig) -> RolloutEngine:
    """With the model's weights, as version 0."""
    config.rollout.max_model_len = max_model_len(config)
    config.rollout.mode = "async"  # single requests, that come and go
    engine = build_rollout_engine(
        RolloutSetup(
            config=config.rollout,
            model=config.model,
            device=torch.device(device_of(config)),
            seed=config.seed,
            max_prompt_length=0,
            max_response_length=0,
            load_checkpoint=True,
        )
    )
    engine.initialize()
    if isinstance(engine, ExternalWeights):
        with engine.overwriting(INITIAL_VERSION):
            """They are those of the files already; its workers are told the version."""
    else:
        engine.version = INITIAL_VERSION
    return engine


def max_model_len(config: ServeConfig) -> int:
    """Longest conversation: as set, else what the model has positions for, within reason."""
    if config.rollout.max_model_len is not None:
        return config.rollout.max_model_len
    path = Path(config.model.path or "")
    positions = read_model_shape(path, config.model.override_config).max_positions if path.is_dir() else 0
    return min(positions or DEFAULT_MODEL_LEN, DEFAULT_MODEL_LEN)


def device_of(config: ServeConfig) -> str:
    """Where the engine computes."""
    if config.device != "auto":
        return config.device
    return "cuda" if count_gpus() > 0 and torch_has_cuda() else "cpu"


def build_server(config: ServeConfig, engine: ServedEngine, key: str, admin_key: str) -> OpenAIServer:
    """The endpoint, not yet listening."""
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    asked, length, vocabulary = config.server, max_model_len(config), read_vocabulary(config.model, tokenizer)
    sampling = SamplingParams(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        max_new_tokens=length,
        stop_token_ids=vocabulary.stop_token_ids,
    )
    options = ServerOptions(
        model=asked.model_name,
        max_model_len=length,
        host=asked.host,
        port=asked.port,
        key=key,
        admin_key=admin_key,
        max_concurrent=asked.max_concurrent,
        max_samples=asked.max_samples,
        connection_s=asked.connection_s,
        request_s=asked.request_s,
        vocab_size=vocabulary.size,
        find_calls=TOOL_FORMATS.get(asked.tool_format),
        template_kwargs=asked.chat_template_kwargs,
    )
    return OpenAIServer(engine, tokenizer, sampling, options, admin=engine)


def read_key(setting: str, file: str | None) -> str:
    """The key in the file, which is made with a random one if it does not exist; without a file a random one, which is logged."""
    if file is None:
        key = secrets.token_urlsafe(KEY_BYTES)
        logger.info("the %s of this run is %s (server.%s keeps one)", setting.removesuffix("_file"), key, setting)
        return key
    path = Path(file).expanduser()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        key = path.read_text(encoding="utf-8").strip()
        if not key:
            raise ConfigError(f"server.{setting}: {path} is empty; write a key to it, or remove it") from None
        return key
    except OSError as error:
        raise ConfigError(f"server.{setting}: {path} cannot be made: {error}") from error
    key = secrets.token_urlsafe(KEY_BYTES)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(key)
    return key


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


class ServedEngine(Administration):
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
