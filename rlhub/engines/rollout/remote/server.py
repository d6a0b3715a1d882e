"""JSON over HTTP to a rollout server, whole or in events, with deadlines, and waiting where the server says that it is full.

§§ checks: Checks of actor_rollout_ref.rollout.remote before any process starts; loads no torch.

§§ staging: This job's copy of the weights that the server is to run, and the folder through which it gets them.

<folder>/<name>-<version>/   a Hugging Face folder, as any server loads it; made under another name and renamed

Engines at one server share the name, and write one after the other (`weights_lock`).

§§ weights_lock: A lock for each server, so that of several engines of a job, ranks or replicas, one brings it each version of the weights.

<folder>/.<name>   locked (flock) by the engine that brings them; records which weights the server has, nothing while they change

What it records when an engine comes is not believed by that engine: the server may have been restarted since, with other weights.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from torch import Tensor

from rlhub.checkpoint.hf import write_hf_weights
from rlhub.config.sections.rollout import RemoteConfig, RolloutConfig
from rlhub.engines.rollout.base import WeightBucket, apply_buckets
from rlhub.errors import ConfigError, DeadlineError, EngineError, RequestError
from rlhub.models.shape import read_model_shape
from rlhub.protocol.weights.fingerprint import combine, fingerprint
from rlhub.protocol.weights.pieces import Piece, whole_piece
from rlhub.utils import faults
from rlhub.utils.atomic import TEMPORARY_SUFFIX

POLL_S = 0.5
AT_FAULT, FULL, UNAVAILABLE = 400, 429, 503
SHOWN = 500  # characters of an error's body in the message
JSON = "application/json"
DATA, LAST_EVENT = b"data:", b"[DONE]"


class BrokenConnectionError(EngineError):
    """The server cannot be reached, or went away while it answered."""


class Http:
    """One server's connections, on one event loop.  url: without the path.  admin_key: of the calls that say so, where it
    differs from `key`. request_s: for one request, waiting for a place or for a server that mends itself included."""

    def __init__(self, url: str, key: str | None, *, request_s: float, admin_key: str | None = None) -> None:
        self.url, self._request_s = url.rstrip("/").removesuffix("/v1"), request_s
        self._headers, self._admin_headers = _bearer(key), _bearer(admin_key or key)
        self._session: aiohttp.ClientSession | None = None

    async def call(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST", admin: bool = False) -> Any:
        """Returns the answer's JSON, None where there is none.  Raises EngineError for any status but success, of which
        RequestError for 400; DeadlineError when it is late.  admin: with the administration's key."""
        async with self._answered(path, body, method, admin=admin) as answer:
            text = await answer.text()
            return await answer.json() if answer.content_type == JSON and text else None

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Yields the JSON of each event as it comes; an answer that is not streamed is the only one.  Raises as `call`, and
        BrokenConnectionError where the last event does not come."""
        async with self._answered(path, body, "POST") as answer:
            if answer.content_type == JSON:
                yield await answer.json()
                return
            async for data in _events(answer.content):
                if data == LAST_EVENT:
                    return
                yield self._decoded(path, data)
        raise BrokenConnectionError(f"{self.url}{path} ended its answer in the middle; does the server still run?")

    def _decoded(self, path: str, data: bytes) -> Any:
        try:
            event = json.loads(data)
        except ValueError as error:
            raise EngineError(f"{self.url}{path} streams what is not JSON: {data[:SHOWN]!r}") from error
        if isinstance(event, dict) and event.get("error"):
            raise EngineError(f"{self.url}{path} failed in the middle of its answer: {str(event['error'])[:SHOWN]}")
        return event

    @asynccontextmanager
    async def _answered(
        self, path: str, body: dict[str, Any] | None, method: str, *, admin: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Gives an answer of success, to be read inside; a server that says when to come back is asked again then."""
        headers = self._admin_headers if admin else self._headers
        deadline = time.monotonic() + self._request_s
        try:
            while True:
                faults.at("remote.request")
                timeout = aiohttp.ClientTimeout(total=max(deadline - time.monotonic(), 0.001))
                request = self._open().request(method, self.url + path, json=body, timeout=timeout, headers=headers)
                async with request as answer:
                    if answer.status < 400:
                        yield answer
                        return
                    retry_after = answer.headers.get("Retry-After")
                    if answer.status != FULL and (answer.status != UNAVAILABLE or retry_after is None or method == "GET"):
                        kind = RequestError if answer.status == AT_FAULT else EngineError
                        raise kind(f"{self.url}{path} answered {answer.status}: {(await answer.text())[:SHOWN]}")
                    wait_s = float(retry_after or "1")
                if time.monotonic() + wait_s > deadline:
                    raise DeadlineError(f"a place at {self.url}{path}", self._request_s, "the server is full: raise its capacity")
                await asyncio.sleep(wait_s)
        except TimeoutError:
            raise DeadlineError(f"an answer of {self.url}{path}", self._request_s) from None
        except (aiohttp.ClientError, ConnectionError) as error:
            message = f"{self.url}{path}: {type(error).__name__}: {error}; does the server still run?"
            raise BrokenConnectionError(message) from error

    async def wait_ready(self, path: str, seconds: float) -> None:
        """Waits until the server answers.  Raises DeadlineError after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                await self.call(path, method="GET")
                return
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise DeadlineError(f"the rollout server {self.url}", seconds, str(error)) from error
            await asyncio.sleep(POLL_S)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # As many connections as there are requests: the server decides how many it takes.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields the data of server-sent events, of any length."""
    rest = b""
    async for some in content.iter_any():
        *lines, rest = (rest + some).split(b"\n")
        for line in lines:
            if line.startswith(DATA):
                yield line.removeprefix(DATA).strip()


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def read_key(setting: str, file: str | None) -> str | None:
    """Returns the key in a file that rollout.remote's setting names.  Raises ConfigError if it cannot be read or is empty."""
    if file is None:
        return None
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"rollout.remote.{setting}: {file} cannot be read: {error}") from error
    if not key:
        raise ConfigError(f"rollout.remote.{setting}: {file} is empty")
    return key


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


KEPT_VERSIONS = 2  # the server may still be reading the one before
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Staging:
    """The copy of one engine.  name: of the server's folders among those of others.  model: the folder whose configuration goes
    with the weights."""

    def __init__(self, folder: Path, name: str, model: str | None) -> None:
        self._folder, self._name = folder, name
        self._model = Path(model) if model is not None and Path(model).is_dir() else None
        self.weights: dict[str, Tensor] = {}

    def take(self, buckets: Iterable[WeightBucket]) -> None:
        """Keeps a whole stream; the first says which weights the model has."""
        if self.weights:
            apply_buckets(buckets, self.weights, self._copy)
            return
        for bucket in buckets:
            self.weights.update({name: tensor.detach().cpu().clone() for name, tensor in bucket})

    def _copy(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            self.weights[name].copy_(tensor)

    def fingerprint(self) -> str:
        """Returns the fingerprint of the weights as they are now."""
        return combine((name, fingerprint(tensor)) for name, tensor in self.weights.items())

    def pieces(self) -> Iterator[Piece]:
        for name, tensor in self.weights.items():
            yield whole_piece(name, tensor)

    def write(self, version: int) -> Path:
        """Writes a folder with the weights as they are now; older ones are removed, and later ones, from before a run was
        resumed."""
        final = self._folder / f"{self._name}-{version}"
        aside = self._folder / f"{self._name}-{version}{TEMPORARY_SUFFIX}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        if self._model is not None and (self._model / "config.json").is_file():
            shutil.copyfile(self._model / "config.json", aside / "config.json")
        write_hf_weights(aside, [list(self._named().items())])
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        versions = self._versions()
        kept = [number for number in versions if number <= version][-KEPT_VERSIONS:]
        for other in set(versions) - set(kept):
            shutil.rmtree(self._folder / f"{self._name}-{other}", ignore_errors=True)
        return final

    def _named(self) -> dict[str, Tensor]:
        """Returns the weights, a tied head too: vLLM on CPU packs it apart from the embedding, and keeps the old one if it is
        not named."""
        tied = HEAD not in self.weights and EMBEDDING in self.weights and self._is_tied()
        return {**self.weights, HEAD: self.weights[EMBEDDING]} if tied else self.weights

    def _is_tied(self) -> bool:
        return self._model is not None and read_model_shape(self._model).tied

    def _versions(self) -> list[int]:
        numbers = (path.name.removeprefix(f"{self._name}-") for path in self._folder.glob(f"{self._name}-*"))
        return sorted(int(number) for number in numbers if number.isdigit())


LOCK_POLL_S = 0.05


class Loaded(NamedTuple):
    """The weights that a server was given.  unique: different each time."""

    version: int
    fingerprint: str
    unique: str


class WeightsRecord:
    """The lock's file while it is locked.  loaded: what the server has, None if that is not known."""

    def __init__(self, file: int, doubted: Loaded | None) -> None:
        self._file = file
        found = _read(file)
        self.loaded = found if found != doubted else None

    def begin(self) -> None:
        """Records that the server's weights change from now on."""
        os.ftruncate(self._file, 0)

    def end(self, version: int, fingerprint: str) -> None:
        """Records that the server has these weights."""
        os.pwrite(self._file, json.dumps(Loaded(version, fingerprint, uuid.uuid4().hex)).encode(), 0)


class WeightsLock:
    """The lock of a server's weights, one object an engine.  name: of the server; timeout_s: longest wait for the others, one
    after the other."""

    def __init__(self, folder: Path, name: str, timeout_s: float) -> None:
        self._path, self._timeout_s = folder / f".{name}", timeout_s
        self._doubted: Loaded | None = None

    def arrive(self) -> None:
        """Notes, at a server that answers, what is recorded so far: it is not believed."""
        with suppress(FileNotFoundError):
            file = os.open(self._path, os.O_RDONLY)
            try:
                self._doubted = _read(file)
            finally:
                os.close(file)

    @contextmanager
    def taken(self) -> Iterator[WeightsRecord]:
        """Blocks until this engine has the lock.  Raises DeadlineError, and EngineError where the folder has no locks."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock(file)
            yield WeightsRecord(file, self._doubted)
        finally:
            os.close(file)  # and the lock with it

    def _lock(self, file: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    others = "another engine of this job is giving the server new weights, and does not come to an end"
                    raise DeadlineError(f"the lock of {self._path}", self._timeout_s, others) from None
            except OSError as error:
                raise EngineError(
                    f"{self._path} cannot be locked ({error}), so engines that share a server would write over each other's "
                    "weights: mount the file system with flock, or name another rollout.remote.weights_folder"
                ) from error
            time.sleep(LOCK_POLL_S)


def _read(file: int) -> Loaded | None:
    try:
        return Loaded(*json.loads(os.pread(file, os.fstat(file).st_size, 0)))
    except (ValueError, TypeError):  # empty, or cut short: whoever wrote it has ended in the middle
        return None
