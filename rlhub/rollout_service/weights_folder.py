"""The folder through which a run publishes its weights to the rollout service, and the readers by which engines load them.

On one machine the folder is in memory.  Memory is not freed when a process is killed, so such a folder has a lock that ends with
the process that holds it, and each run removes the folders whose lock is free.

Either one reader in the engine's process loads the weights, or one reader in each of the engine's workers.  Both work in two
phases (see sharding_manager.files): `prepare` while the engine generates, and `place` while it is paused.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rlhub.engines.rollout.base import ExternalWeights, RolloutEngine
from rlhub.errors import EngineError, RlhubError
from rlhub.protocol.weights.fingerprint import combine
from rlhub.sharding_manager.files import MappedVersion, WeightReader
from rlhub.sharding_manager.route import SyncReport

logger = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rlhub-weights-"
BELOW_RUN = f"{PREFIX}in-flight"
"""Name of the folder below the run folder, used where no memory is available; it is removed at the end, so no user would choose
it."""
ROOM_FACTOR = 6
"""The required free memory as a multiple of the size of the model's files: three versions (two are kept while the next is
written) of weights that may be float32 where the files are bfloat16."""
FIRST_POLL_S, LONGEST_POLL_S = 0.01, 0.2  # a look at the workers falls between two of their steps


class WeightsFolder:
    """The folder in which versions are written.  `close` removes what this process created."""

    def __init__(self, path: Path, lock: int | None = None, *, temporary: bool) -> None:
        self.path = path
        self._lock, self._temporary = lock, temporary
        path.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Removes a temporary folder and its lock.  Idempotent."""
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            _lock_file(self.path).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def open_weights_folder(
    configured: str | None, *, one_machine: bool, run_folder: Path, model_bytes: int, memory: Path = SHARED_MEMORY
) -> WeightsFolder:
    """Returns the configured folder, which is kept at the end; without one, a folder in this machine's memory, or below the run
    folder if replicas run on other machines or the memory is too small.

    model_bytes: the size of the model's files, 0 if unknown.
    """
    if configured is not None:
        return WeightsFolder(Path(configured).absolute(), temporary=False)
    if one_machine:
        try:
            remove_abandoned(memory)
            if memory.is_dir() and shutil.disk_usage(memory).free >= ROOM_FACTOR * model_bytes:
                return _in_memory(memory)
            reason = f"has no room for {ROOM_FACTOR} times the model's {model_bytes / 1e9:.1f} GB"
        except OSError as error:  # read-only, or another's
            reason = f"cannot be used ({error.strerror or error})"
        logger.warning(
            "%s %s: weights are published through %s, which may be slower; enlarge it or make it writable, or set "
            "actor_rollout_ref.rollout.weights_folder",
            memory, reason, run_folder,
        )  # fmt: skip
    return WeightsFolder(run_folder.absolute() / BELOW_RUN, temporary=True)


def files_bytes(model_path: str | None) -> int:
    """Returns the size of the weight files in a model's folder."""
    if model_path is None:
        return 0
    files = (path for kind in ("*.safetensors", "*.bin") for path in Path(model_path).glob(kind))
    return sum(path.stat().st_size for path in files)


def remove_abandoned(memory: Path = SHARED_MEMORY) -> None:
    """Removes the folders of processes that have ended."""
    for lock_file in memory.glob(f"{PREFIX}*.lock"):
        try:
            descriptor = os.open(lock_file, os.O_RDWR)
        except OSError:  # another user's, or gone just now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
            lock_file.unlink(missing_ok=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def _in_memory(memory: Path) -> WeightsFolder:
    path = memory / f"{PREFIX}{uuid.uuid4().hex[:12]}"
    new = path.with_name(path.name + ".new")  # no process finds the file before it is locked
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(_lock_file(path))
    return WeightsFolder(path, lock, temporary=True)


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


class FolderReader(Protocol):
    """The reader of one replica; see WeightReader for the errors of both methods."""

    def prepare(self, version: int) -> MappedVersion | int:
        """Reads and checks a version while the engine generates; returns it for `place`."""
        ...

    def place(self, mapped: Any) -> SyncReport:
        """Copies the weights into the paused engine.  mapped: the return value of `prepare`."""
        ...


def folder_reader(engine: RolloutEngine, folder: Path, *, bucket_bytes: int, timeout_s: float) -> FolderReader:
    """Returns the reader for this engine."""
    if isinstance(engine, ExternalWeights):
        return WorkersReader(engine, folder, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    return WeightReader(engine, folder, bucket_bytes=bucket_bytes, timeout_s=timeout_s)


class WorkersReader:
    """Runs a reader in every worker of the engine: each maps the files, copies its own parts and compares what it then holds."""

    def __init__(self, engine: ExternalWeights, folder: Path, *, bucket_bytes: int, timeout_s: float) -> None:
        self._engine = engine
        self._settings = (str(folder), bucket_bytes, timeout_s)

    def prepare(self, version: int) -> int:
        """Prepares the version in all workers, and returns it."""
        self._call("begin", version, *self._settings)
        pause_s = FIRST_POLL_S
        while not all(self._call("prepared")):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
        return version

    def place(self, mapped: int) -> SyncReport:
        """Copies the weights in all workers.  The fingerprint of the report is the writer's if there is one worker, and otherwise
        combined from the workers' parts."""
        start = time.perf_counter()
        with self._engine.overwriting(mapped):
            reports: Sequence[SyncReport] = self._call("place", mapped)
        first = reports[0]
        parts = [(f"worker {rank}", int(report.fingerprint, 16)) for rank, report in enumerate(reports)]
        return SyncReport(
            seconds=time.perf_counter() - start,
            bytes=sum(report.bytes for report in reports),
            num_weights=first.num_weights,
            version=mapped,
            fingerprint=first.fingerprint if len(reports) == 1 else combine(parts),
        )

    def _call(self, method: str, *arguments: Any) -> Sequence[Any]:
        return self._engine.call_workers(f"{__name__}:{WorkerReader.__name__}", method, *arguments)


class WorkerReader:
    """The reader in one worker.  The worker calls it between two steps, so long work runs in a thread during the next steps."""

    def __init__(self, weights: Any) -> None:
        """Takes the worker's weights, an object with the methods of RolloutEngine that WeightReader uses."""
        self._weights = weights
        self._settings: tuple[str, int, float] | None = None
        self._reader: WeightReader | None = None
        self._thread: threading.Thread | None = None
        self._mapped: MappedVersion | None = None
        self._error: BaseException | None = None

    def begin(self, version: int, folder: str, bucket_bytes: int, timeout_s: float) -> None:
        """Starts to prepare the version."""
        settings = (folder, bucket_bytes, timeout_s)
        if settings != self._settings:
            self._reader = WeightReader(self._weights, Path(folder), bucket_bytes=bucket_bytes, timeout_s=timeout_s)
            self._settings = settings
        self._mapped = self._error = None
        self._thread = threading.Thread(target=self._prepare, args=(self._reader, version), name="weights", daemon=True)
        self._thread.start()

    def _prepare(self, reader: WeightReader, version: int) -> None:
        try:
            mapped = reader.prepare(version)
            if self._thread is threading.current_thread():  # else a later `begin` has replaced this one
                self._mapped = mapped
        except BaseException as error:  # noqa: BLE001  a thread's boundary: `prepared` raises it
            self._error = error

    def prepared(self) -> bool:
        """Returns whether the version is ready; raises the error of its preparation."""
        if self._error is not None:
            raise as_rlhub_error(self._error)
        return self._mapped is not None

    def place(self, version: int) -> SyncReport:
        """Copies the version into the worker, while the engine is paused."""
        if self._reader is None or self._mapped is None or self._mapped.version != version:
            raise EngineError(f"version {version} of the weights has not been prepared in this worker")
        mapped, self._mapped = self._mapped, None
        return self._reader.place(mapped)


def as_rlhub_error(error: BaseException) -> RlhubError:
    """Returns the error in a form that reaches the replica with its type, if that is one of rlhub's, or as an EngineError."""
    if isinstance(error, RlhubError):
        return error
    return EngineError(f"reading the weights failed in a worker: {type(error).__name__}: {error}")
