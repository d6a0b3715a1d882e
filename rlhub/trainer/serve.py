"""The server process: a rollout engine with a model, and OpenAI's interface to it.

`ServedEngine` is the engine behind the endpoint.  It generates, takes new weights while it serves, and is rebuilt when it has
failed.  Its administration is the same whether the weights are in this process or in workers of the engine.
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
from rlhub.agents.openai_server.answering import ServerOptions
from rlhub.agents.openai_server.errors import unavailable
from rlhub.agents.openai_server.server import OpenAIServer
from rlhub.config.rules.derive import resolve_device
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
from rlhub.tools.registry import reply_format
from rlhub.utils.atomic import write_text

logger = logging.getLogger(__name__)

DEFAULT_MODEL_LEN = 8192
"""Tokens of the longest conversation, where neither the settings nor the model give a smaller bound."""
KEY_BYTES = 32
INITIAL_VERSION = 0
HEALTH_CHECK_S = 1.0  # between two checks of an engine that gets no requests
VERSION_TIMEOUT_S = 1.0  # to wait for a version that the trainer has announced
HEAD = "lm_head.weight"


def serve(config: ServeConfig) -> int:
    """Serves the model until SIGINT or SIGTERM, and returns the exit status 0."""
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
    """Runs the endpoint until a signal comes or the engine cannot be rebuilt, which raises EngineError."""
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
        watching.result()  # raises the reason why the engine cannot be rebuilt
    watching.cancel()
    return 0


def build_engine(config: ServeConfig) -> RolloutEngine:
    """Builds the rollout engine with the model's weights, as version 0."""
    config.rollout.max_model_len = max_model_len(config)
    config.rollout.mode = "async"  # the endpoint sends single requests
    engine = build_rollout_engine(
        RolloutSetup(
            config=config.rollout,
            model=config.model,
            device=torch.device(resolve_device(config.device)),
            seed=config.seed,
            max_prompt_length=0,
            max_response_length=0,
            load_checkpoint=True,
            structured=True,
        )
    )
    engine.initialize()
    if isinstance(engine, ExternalWeights):
        with engine.overwriting(INITIAL_VERSION):
            """The workers have the files' weights already, and learn their version."""
    else:
        engine.version = INITIAL_VERSION
    return engine


def max_model_len(config: ServeConfig) -> int:
    """Returns the tokens of the longest conversation: as set, else the model's positions, at most DEFAULT_MODEL_LEN."""
    if config.rollout.max_model_len is not None:
        return config.rollout.max_model_len
    path = Path(config.model.path or "")
    positions = read_model_shape(path, config.model.override_config).max_positions if path.is_dir() else 0
    return min(positions or DEFAULT_MODEL_LEN, DEFAULT_MODEL_LEN)


def build_server(config: ServeConfig, engine: ServedEngine, key: str, admin_key: str) -> OpenAIServer:
    """Builds the endpoint, which does not listen yet."""
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    section, length, vocabulary = config.server, max_model_len(config), read_vocabulary(config.model, tokenizer)
    form = reply_format(section.tool_format, section.reasoning_parser, tokenizer, section.chat_template_kwargs)
    sampling = SamplingParams(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        max_new_tokens=length,
        stop_token_ids=vocabulary.stop_token_ids,
    )
    options = ServerOptions(
        model=section.model_name,
        max_model_len=length,
        host=section.host,
        port=section.port,
        key=key,
        admin_key=admin_key,
        max_concurrent=section.max_concurrent,
        max_samples=section.max_samples,
        connection_s=section.connection_s,
        request_s=section.request_s,
        vocab_size=vocabulary.size,
        find_calls=form.find_calls,
        parser=form.parser,
        template_kwargs=section.chat_template_kwargs,
    )
    return OpenAIServer(engine, tokenizer, sampling, options, admin=engine)


def read_key(setting: str, file: str | None) -> str:
    """Returns the key in the file, which is written with a random key if it does not exist, readable by its owner alone.

    Without a file the key is random and logged.  setting: name of the setting that names the file.
    """
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


@dataclass(slots=True, kw_only=True, frozen=True)
class ServeLimits:
    """Limits of a served engine.

    recompute: whether requests compute their KV caches again after a weight update; bucket_bytes: bytes of weights that are
    moved at a time; rebuilds: how often in a row the engine is rebuilt, without a completion in between.
    """

    recompute: bool
    bucket_bytes: int
    rebuilds: int


@dataclass(slots=True, kw_only=True, frozen=True)
class _Published:
    """The weights that the engine was given last.  files: names, sizes and times, which show whether the folder has changed."""

    folder: Path
    version: int
    files: tuple[tuple[str, int, int], ...]


class ServedEngine(Administration):
    """The engine behind the endpoint, as `EpisodeEngine` and `Administration`.

    All methods but `shutdown` run on one event loop.  build: returns an initialized engine with the weights of the model's files.
    """

    def __init__(self, build: Callable[[], RolloutEngine], limits: ServeLimits) -> None:
        self._build, self._limits = build, limits
        self._engine, self._admin = self._built()
        self._version = self._engine.version
        self._published: _Published | None = None
        self._lost = ""  # why there is no engine with the weights it should have
        self._failed = ""  # why the engine failed, or building another one
        self._rebuilt = 0
        self._lock = asyncio.Lock()  # one administrator's call or rebuild at a time
        self._check_now = asyncio.Event()

    def _built(self) -> tuple[RolloutEngine, EngineAdministration]:
        engine, limits = self._build(), self._limits
        return engine, EngineAdministration(engine, recompute=limits.recompute, bucket_bytes=limits.bucket_bytes)

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """Returns one completion.  Raises ApiError with status 503 while no engine can generate it."""
        if broken := self._lost or self._engine.failure:
            self._check_now.set()
            raise unavailable(broken)
        try:
            completion = await self._engine.agenerate(request, params, follow)
        except RequestError:
            raise
        except EngineError:
            self._check_now.set()
            raise
        self._rebuilt = 0
        return completion

    @property
    def failure(self) -> str:
        """The reason why the engine cannot generate now; "" while it can."""
        return self._lost or self._engine.failure or self._admin.failure

    async def watch(self) -> NoReturn:
        """Checks the engine for ever, and rebuilds it when it has failed.  Raises EngineError where that failed too often."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._check_now.wait(), HEALTH_CHECK_S)
            self._check_now.clear()
            async with self._lock:
                await self._rebuild_failed()

    async def pause(self) -> None:
        async with self._lock:
            await self._rebuild_failed()
            await asyncio.to_thread(self._admin.pause)

    async def resume(self, *, recompute: bool) -> None:
        async with self._lock:
            await self._rebuild_failed()
            await asyncio.to_thread(self._admin.resume, recompute=recompute)

    async def reload(self, folder: str, version: int, *, reset_version: bool) -> dict[str, Any]:
        async with self._lock:
            if version <= self._version and not reset_version:
                raise VersionError(
                    f"version {version} is not newer than version {self._version}, which the engine has: count on from there, or "
                    "send reset_version=true where another run begins"
                )
            await self._rebuild_failed()
            files = await asyncio.to_thread(_weight_files, folder)
            await asyncio.to_thread(self._admin.update_weights, Path(folder), version)
            logger.info("version %d from %s", version, folder)
            self._version, self._lost = version, ""
            self._published = _Published(folder=Path(folder), version=version, files=files)
        return await self.status()

    async def status(self) -> dict[str, Any]:
        return {**self._admin.status(), "version": self._version, "failure": self.failure}

    async def _rebuild_failed(self) -> None:
        """Rebuilds the engine if it has failed; the caller holds the lock."""
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
            except Exception as error:  # noqa: BLE001  whatever building an engine raises is tried again, then reported
                self._failed = f"{type(error).__name__}: {error}"
            else:
                self._failed = self._engine.failure
                logger.info("the engine was built anew")

    def _replace(self) -> str:
        """Puts a new engine in the failed one's place.  Returns the reason why it lacks the weights it should have, or ""."""
        paused = self._admin.paused
        self._engine.shutdown()
        self._engine, self._admin = self._built()
        if paused:
            self._admin.pause()
        last = self._published
        if last is None:
            return ""
        try:
            if _weight_files(last.folder) != last.files:
                raise RequestError("the files are others now")
            self._admin.update_weights(last.folder, last.version)
        except EngineError as error:
            unread = f"version {last.version} cannot be read again from {last.folder}"
            logger.error("%s: %s", unread, error)
            return f"it was built anew, and {unread} ({error}): publish a newer version at /admin/weights"
        return ""

    def shutdown(self) -> None:
        """Ends the engine.  Idempotent."""
        self._engine.shutdown()


def _weight_files(folder: str | Path) -> tuple[tuple[str, int, int], ...]:
    """Returns name, size and time of a Hugging Face folder's weight files; () for a trainer's folder of numbered versions."""
    try:
        found = [(file.name, file.stat()) for file in sorted(Path(folder).glob("*.safetensors"))]
    except (OSError, ValueError) as error:
        raise RequestError(f"the folder cannot be read: {error}", param="folder") from error
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


class EngineAdministration:
    """Pauses one engine and gives it new weights.  Its methods block; `ServedEngine` calls them in a thread, one at a time."""

    def __init__(self, engine: RolloutEngine, *, recompute: bool, bucket_bytes: int) -> None:
        self._engine, self._recompute, self._bucket_bytes = engine, recompute, bucket_bytes
        self._readers: dict[str, FolderReader] = {}
        self.paused = False  # by `pause`, so that new weights do not resume it
        self.half_written = False  # an update failed half-way: the engine stays paused until it has whole weights

    def pause(self) -> None:
        """Pauses the engine; it stays paused when weights are updated, until `resume`."""
        self._engine.pause()
        self.paused = True

    def resume(self, *, recompute: bool) -> None:
        """Resumes the engine.  recompute: its requests compute their KV caches again, where the settings allow it."""
        self.paused = False
        self._engine.resume(recompute=recompute and self._recompute)

    def update_weights(self, folder: Path, version: int) -> None:
        """Updates the engine's weights from a Hugging Face folder, or from the folder of a trainer's WeightWriter.

        Raises RequestError, with the engine unchanged, for a folder that cannot be used, and EngineError where writing the
        weights failed half-way.
        """
        try:
            write = self._prepare(folder, version)
        except (RlhubError, OSError, ValueError) as error:  # ValueError: no path at all
            raise RequestError(f"{error}; nothing was changed", param="folder") from error
        self._engine.pause()
        self.half_written = True
        write()
        self.half_written = False
        if not self.paused:
            self._engine.resume(recompute=self._recompute)

    def _prepare(self, folder: Path, version: int) -> Callable[[], object]:
        """Does all that can fail while the engine still serves, and returns the rest, which needs the engine paused."""
        if any(folder.glob("*.safetensors")):
            return self._prepare_model(folder, version)
        if any(folder.glob("version-*")):
            if str(folder) not in self._readers:
                reader = folder_reader(self._engine, folder, bucket_bytes=self._bucket_bytes, timeout_s=VERSION_TIMEOUT_S)
                self._readers[str(folder)] = reader
            return partial(self._readers[str(folder)].place, self._readers[str(folder)].prepare(version))
        raise EngineError(f"no weights in {folder}: neither *.safetensors files nor version-<n> folders")

    def _prepare_model(self, folder: Path, version: int) -> Callable[[], object]:
        """Prepares as `_prepare` does, from a Hugging Face folder."""
        engine = self._engine
        if isinstance(engine, ExternalWeights):
            target = f"{__name__}:{WorkerFolder.__name__}"
            engine.call_workers(target, "check", str(folder))

            def write() -> None:
                with engine.overwriting(version):
                    engine.call_workers(target, "load", str(folder), version)

            return write
        return partial(engine.update_weights, fitting_buckets(folder, engine), version)

    def status(self) -> dict[str, Any]:
        """Returns the engine's version, its load and whether it is paused."""
        return {"version": self._engine.version, "load": self._engine.load, "paused": self.paused or self.half_written}

    @property
    def failure(self) -> str:
        """The reason why the engine stays paused until whole weights come; "" where there is none."""
        return "its weights are half-written: publish whole ones at /admin/weights" if self.half_written else ""


class Weights(Protocol):
    """The weights of an engine, or of one of its workers; see RolloutEngine."""

    def live_weights(self) -> Iterator[Piece]: ...

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None: ...


class WorkerFolder:
    """Reads a Hugging Face folder in each worker of an engine with external weights."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def check(self, folder: str) -> None:
        """Raises EngineError where the folder cannot be read or has another model's weights."""
        fitting_buckets(Path(folder), self._weights)

    def load(self, folder: str, version: int) -> None:
        """Loads the folder's weights as `version`, while the engine is paused."""
        self._weights.update_weights(fitting_buckets(Path(folder), self._weights), version)


def fitting_buckets(folder: Path, weights: Weights) -> list[WeightBucket]:
    """Returns the folder's weights as `update_weights` takes them.

    Raises EngineError where their names or shapes are not those of the engine, or some are not finite; nothing is written then.
    """
    shapes = {piece.name: tuple(piece.shape) for piece in weights.live_weights()}

    def compare(bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            if tuple(tensor.shape) != shapes[name]:
                raise EngineError(f"{name} has shape {tuple(tensor.shape)}, and {shapes[name]} in the engine")

    buckets = read_buckets(folder)
    if HEAD not in shapes:  # a folder may hold a tied head besides its embedding; an engine holds the two once
        buckets = [[(name, tensor) for name, tensor in bucket if name != HEAD] for bucket in buckets]
    try:
        apply_buckets(buckets, shapes, compare)
    except EngineError as error:
        raise EngineError(f"the weights in {folder} are another model's, and nothing was changed: {error}") from error
    if found := nonfinite_names(entry for bucket in buckets for entry in bucket):
        raise EngineError(f"weights in {folder} are not finite, and nothing was changed: {abbreviate(found)}")
    return buckets


def read_buckets(folder: Path) -> list[WeightBucket]:
    """Returns a bucket for each file.  Its tensors are memory-mapped, so that copying them reads the file.

    Raises EngineError where a file cannot be read.
    """
    try:
        return [_bucket(file) for file in sorted(folder.glob("*.safetensors"))]
    except (OSError, SafetensorError) as error:
        raise EngineError(f"the weights in {folder} cannot be read: {error}") from error


def _bucket(file: Path) -> WeightBucket:
    with safe_open(file, framework="pt") as opened:
        return [(name, opened.get_tensor(name)) for name in opened.keys()]
