"""A rollout server that another job runs: requests to it over HTTP, the checks of its settings, and the delivery of weights.

    Http                    JSON over HTTP, as whole answers or server-sent events, with a deadline for each request
    remote_problems         the checks of the section rollout.remote before any process starts
    Staging                 this job's copy of the weights, written as folders that the server loads
    WeightsLock             a file lock for each server, so that it gets each version of the weights once

New weights reach a server through a folder that both jobs can read:

    <folder>/<name>-<version>/   a Hugging Face folder, written under a temporary name and renamed when it is whole
    <folder>/.<name>             the lock (flock), whose content records the weights that the server runs

Several engines of a job, ranks or replicas, may use one server.  They share its name in the folder, and the first to take the
lock writes and loads a version for all of them.  An engine ignores the record that it finds when it connects, because the
server may have been restarted with other weights since the record was written.
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

SECTION = "actor_rollout_ref.rollout.remote"
EVALUATION_ONLY = ("openai",)
"""The servers whose dialect sets `trains` to False."""
READY_POLL_S = 0.5
LOCK_POLL_S = 0.05
BAD_REQUEST, TOO_MANY_REQUESTS, UNAVAILABLE = 400, 429, 503
SHOWN_CHARACTERS = 500  # of an error's body, in the message
JSON = "application/json"
DATA, LAST_EVENT = b"data:", b"[DONE]"
KEPT_VERSIONS = 2  # a server may still be reading the previous version
OUTPUT_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class BrokenConnectionError(EngineError):
    """The server cannot be reached, or went away while it answered."""


class Http:
    """The connections to one server, on one event loop.

    url: the server's address, without a path.
    key: the bearer token of requests; None sends none.
    admin_key: the token of administrative calls, if it differs from `key`.
    request_s: the deadline of one request in seconds, including the wait for a server that is full or unavailable.
    """

    def __init__(self, url: str, key: str | None, *, request_s: float, admin_key: str | None = None) -> None:
        self.url, self._request_s = url.rstrip("/").removesuffix("/v1"), request_s
        self._headers, self._admin_headers = _bearer(key), _bearer(admin_key or key)
        self._session: aiohttp.ClientSession | None = None

    async def call(self, path: str, body: dict[str, Any] | None = None, *, method: str = "POST", admin: bool = False) -> Any:
        """Returns the JSON of the answer, or None for an empty one.

        Raises RequestError for status 400, EngineError for any other status than success, and DeadlineError when the answer is
        late.  admin: authenticates with the administrator's key.
        """
        async with self._response(path, body, method, admin=admin) as answer:
            text = await answer.text()
            return await answer.json() if answer.content_type == JSON and text else None

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Yields the JSON of each event as it arrives; an answer that is not streamed is yielded as the only event.

        Raises the errors of `call`, and BrokenConnectionError if the stream ends before its last event.
        """
        async with self._response(path, body, "POST") as answer:
            if answer.content_type == JSON:
                yield await answer.json()
                return
            async for data in _server_sent_events(answer.content):
                if data == LAST_EVENT:
                    return
                yield self._decoded(path, data)
        raise BrokenConnectionError(f"{self.url}{path} ended its answer in the middle; does the server still run?")

    def _decoded(self, path: str, data: bytes) -> Any:
        try:
            event = json.loads(data)
        except ValueError as error:
            raise EngineError(f"{self.url}{path} streams what is not JSON: {data[:SHOWN_CHARACTERS]!r}") from error
        if isinstance(event, dict) and event.get("error"):
            raise EngineError(f"{self.url}{path} failed in the middle of its answer: {str(event['error'])[:SHOWN_CHARACTERS]}")
        return event

    @asynccontextmanager
    async def _response(
        self, path: str, body: dict[str, Any] | None, method: str, *, admin: bool = False
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yields a successful response, to be read inside the context.  While a server is full, or names a time to retry, the
        request is repeated until the deadline."""
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
                    if answer.status != TOO_MANY_REQUESTS and (
                        answer.status != UNAVAILABLE or retry_after is None or method == "GET"
                    ):
                        kind = RequestError if answer.status == BAD_REQUEST else EngineError
                        raise kind(f"{self.url}{path} answered {answer.status}: {(await answer.text())[:SHOWN_CHARACTERS]}")
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
        """Waits until the server answers a GET of `path`.  Raises DeadlineError after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                await self.call(path, method="GET")
                return
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise DeadlineError(f"the rollout server {self.url}", seconds, str(error)) from error
            await asyncio.sleep(READY_POLL_S)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # One connection a request, without a limit: the server decides how many it accepts.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


async def _server_sent_events(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields the data of each server-sent event, which may be of any length."""
    rest = b""
    async for some in content.iter_any():
        *lines, rest = (rest + some).split(b"\n")
        for line in lines:
            if line.startswith(DATA):
                yield line.removeprefix(DATA).strip()


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def read_key(setting: str, file: str | None) -> str | None:
    """Returns the key that is stored in `file`, or None if no file is set.  Raises ConfigError, naming the setting, if the
    file cannot be read or is empty."""
    if file is None:
        return None
    try:
        key = Path(file).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"rollout.remote.{setting}: {file} cannot be read: {error}") from error
    if not key:
        raise ConfigError(f"rollout.remote.{setting}: {file} is empty")
    return key


def remote_problems(config: RolloutConfig, *, trains: bool) -> list[str]:
    """Returns a sentence for each problem with the servers' addresses, their keys and, if the job `trains`, the delivery of
    weights."""
    remote = config.remote
    problems = [
        f"{SECTION}.urls: {url!r} is no address; expected http://host:port or https://host:port"
        for url in remote.urls
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc
    ]
    if not remote.urls:
        problems.append(
            f"{SECTION}.urls is not set, but actor_rollout_ref.rollout.name={config.name}: name the servers, for example "
            "[http://host:8000] (python -m rlhub.trainer.main_serve starts one)"
        )
    if trains and config.lora_sync == "adapter":
        problems.append(
            "actor_rollout_ref.rollout.lora_sync=adapter: a server of another job takes whole models; set it to merged"
        )
    keys = [*_key_problems("api_key_file", remote.api_key_file), *_key_problems("admin_key_file", remote.admin_key_file)]
    return [*problems, *keys, *(_weight_problems(remote) if trains else ())]


def one_replica_per_server(config: RolloutConfig) -> int:
    """Returns the number of distinct servers.  A server runs one version of the weights and pauses for all its requests, so
    two replicas must not share it."""
    return max(len(set(config.remote.urls)), 1)


def _key_problems(setting: str, file: str | None) -> list[str]:
    if file is None:
        return []
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        return [f"{SECTION}.{setting}={file} cannot be read ({error}); name the file from which the servers have their key"]
    return [] if text.strip() else [f"{SECTION}.{setting}={file} is empty; write the servers' key to it"]


def _weight_problems(remote: RemoteConfig) -> list[str]:
    problems = []
    if remote.server in EVALUATION_ONLY:
        problems.append(
            f"{SECTION}.server={remote.server} gives no token ids, so it serves evaluation only (rlhub.trainer.main_eval); to "
            "train set rlhub, vllm or sglang"
        )
    if remote.weights_folder is None:
        problems.append(
            f"{SECTION}.weights_folder is not set: the servers get new weights through it; name a folder that this job and the "
            "servers reach under the same path"
        )
        return problems
    folder = Path(remote.weights_folder).expanduser().absolute()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problems.append(
            f"{SECTION}.weights_folder={remote.weights_folder}: {existing} is not a folder we may write to; name another"
        )
    return problems


class Staging:
    """Keeps one engine's copy of the weights and writes it as folders for the server.

    name: the prefix of this server's folders; other servers share the same parent folder under other names.
    model: a local model folder, whose config.json is copied next to the weights.
    """

    def __init__(self, folder: Path, name: str, model: str | None) -> None:
        self._folder, self._name = folder, name
        self._model = Path(model) if model is not None and Path(model).is_dir() else None
        self.weights: dict[str, Tensor] = {}

    def take(self, buckets: Iterable[WeightBucket]) -> None:
        """Copies a whole stream of weights.  The first stream defines which weights the model has."""
        if self.weights:
            apply_buckets(buckets, self.weights, self._copy)
            return
        for bucket in buckets:
            self.weights.update({name: tensor.detach().cpu().clone() for name, tensor in bucket})

    def _copy(self, bucket: WeightBucket) -> None:
        for name, tensor in bucket:
            self.weights[name].copy_(tensor)

    def fingerprint(self) -> str:
        """Returns the fingerprint of the present weights."""
        return combine((name, fingerprint(tensor)) for name, tensor in self.weights.items())

    def pieces(self) -> Iterator[Piece]:
        for name, tensor in self.weights.items():
            yield whole_piece(name, tensor)

    def write(self, version: int) -> Path:
        """Writes the present weights into the folder of `version` and returns its path.  Removes older versions, and higher
        ones that were written before the run was resumed from an earlier checkpoint."""
        final = self._folder / f"{self._name}-{version}"
        unfinished = self._folder / f"{self._name}-{version}{TEMPORARY_SUFFIX}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        if self._model is not None and (self._model / "config.json").is_file():
            shutil.copyfile(self._model / "config.json", unfinished / "config.json")
        write_hf_weights(unfinished, [list(self._named().items())])
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        versions = self._versions()
        kept = [number for number in versions if number <= version][-KEPT_VERSIONS:]
        for other in set(versions) - set(kept):
            shutil.rmtree(self._folder / f"{self._name}-{other}", ignore_errors=True)
        return final

    def _named(self) -> dict[str, Tensor]:
        """Returns the weights by name, with a tied output head as an entry of its own: vLLM on CPU stores the head apart from
        the embedding and would keep the old one."""
        tied = OUTPUT_HEAD not in self.weights and EMBEDDING in self.weights and self._is_tied()
        return {**self.weights, OUTPUT_HEAD: self.weights[EMBEDDING]} if tied else self.weights

    def _is_tied(self) -> bool:
        return self._model is not None and read_model_shape(self._model).tied

    def _versions(self) -> list[int]:
        numbers = (path.name.removeprefix(f"{self._name}-") for path in self._folder.glob(f"{self._name}-*"))
        return sorted(int(number) for number in numbers if number.isdigit())


class LoadedVersion(NamedTuple):
    """Identifies the weights that a server has loaded.  unique: a random id, so that two loads of equal weights differ."""

    version: int
    fingerprint: str
    unique: str


class WeightsRecord:
    """Reads and writes the content of the lock file while the lock is held.

    loaded: the weights that the server runs; None if that is unknown.
    untrusted: a record to ignore, because it was written before this engine connected.
    """

    def __init__(self, file: int, untrusted: LoadedVersion | None) -> None:
        self._file = file
        recorded = _read_record(file)
        self.loaded = recorded if recorded != untrusted else None

    def begin(self) -> None:
        """Records that the server's weights are about to change, by emptying the file."""
        os.ftruncate(self._file, 0)

    def end(self, version: int, fingerprint: str) -> None:
        """Records that the server has loaded these weights."""
        os.pwrite(self._file, json.dumps(LoadedVersion(version, fingerprint, uuid.uuid4().hex)).encode(), 0)


class WeightsLock:
    """Locks the weights of one server; every engine has its own object.

    name: the server's name in the folder.
    timeout_s: the longest wait in seconds for all other engines together.
    """

    def __init__(self, folder: Path, name: str, timeout_s: float) -> None:
        self._path, self._timeout_s = folder / f".{name}", timeout_s
        self._untrusted: LoadedVersion | None = None

    def arrive(self) -> None:
        """Notes the present record as untrusted.  Call once the server answers."""
        with suppress(FileNotFoundError):
            file = os.open(self._path, os.O_RDONLY)
            try:
                self._untrusted = _read_record(file)
            finally:
                os.close(file)

    @contextmanager
    def taken(self) -> Iterator[WeightsRecord]:
        """Blocks until this engine has the lock, and holds it inside the context.  Raises DeadlineError, and EngineError if
        the file system has no locks."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._lock(file)
            yield WeightsRecord(file, self._untrusted)
        finally:
            os.close(file)  # this releases the lock too

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


def _read_record(file: int) -> LoadedVersion | None:
    """Returns the recorded weights, or None for an empty or damaged record."""
    try:
        return LoadedVersion(*json.loads(os.pread(file, os.fstat(file).st_size, 0)))
    except (ValueError, TypeError):  # empty, or cut short by a writer that was killed
        return None
