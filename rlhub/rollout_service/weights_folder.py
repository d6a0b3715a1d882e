"""The folder through which a run publishes its weights to the rollout service, and the readers by which engines load them.

On one machine the folder is in memory.  With rollout.weights=collective each replica has a mirror in its own memory, which it
fills from the training ranks.

Either one reader in the engine's process loads the weights, or one reader in each of the engine's workers.  Both work in two
phases (see sharding_manager.reader): `prepare` while the engine generates, and `place` while it is paused.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.engines.rollout.base import ExternalWeights, RolloutEngine
from rlhub.errors import EngineError, ResourceError, RlhubError
from rlhub.protocol.weights.fingerprint import combine
from rlhub.sharding_manager.files import PREFIX, SHARED_MEMORY, WeightsFolder, new_in_memory, remove_abandoned
from rlhub.sharding_manager.mirror import SCHEME, Mirror
from rlhub.sharding_manager.reader import MappedVersion, WeightReader
from rlhub.sharding_manager.route import SyncReport

logger = logging.getLogger(__name__)
BELOW_RUN = f"{PREFIX}in-flight"
"""Name of the folder below the run folder, used where no memory is available; it is removed at the end, so no user would choose
it."""
ROOM_FACTOR = 6
"""The required free memory as a multiple of the size of the model's files: three versions (two are kept while the next is
written) of weights that may be float32 where the files are bfloat16."""
FIRST_POLL_S, LONGEST_POLL_S = 0.01, 0.2  # a look at the workers falls between two of their steps


def open_weights_folder(
    config: RolloutConfig, *, one_machine: bool, run_folder: Path, model_bytes: int, memory: Path = SHARED_MEMORY
) -> WeightsFolder:
    """Returns the configured folder, which is kept at the end; without one, by `weights`, a folder in this machine's memory, or
    below the run folder.

    model_bytes: the size of the model's files, 0 if unknown.  Raises ResourceError for weights=memory where replicas run on other
    machines or the memory cannot be used; weights=auto then takes the run folder.
    """
    if config.weights_folder is not None:
        return WeightsFolder(Path(config.weights_folder).absolute(), temporary=False)
    if config.weights != "folder" and (one_machine or config.weights == "memory"):
        found = _in_memory(memory, model_bytes) if one_machine else "is one machine's, and replicas run on several"
        if isinstance(found, WeightsFolder):
            return found
        remedy = "enlarge it or make it writable, or set actor_rollout_ref.rollout.weights_folder"
        if config.weights == "memory":
            raise ResourceError(f"actor_rollout_ref.rollout.weights=memory: {memory} {found}; {remedy} with weights=folder")
        logger.warning("%s %s: weights are published through %s, which may be slower; %s", memory, found, run_folder, remedy)
    return WeightsFolder(run_folder.absolute() / BELOW_RUN, temporary=True)


def _in_memory(memory: Path, model_bytes: int) -> WeightsFolder | str:
    """Returns a new folder in memory, or the reason why there can be none."""
    try:
        remove_abandoned(memory)
        if memory.is_dir() and shutil.disk_usage(memory).free >= ROOM_FACTOR * model_bytes:
            return new_in_memory(memory)
        return f"has no space for {ROOM_FACTOR} times the model's {model_bytes / 1e9:.1f} GB"
    except OSError as error:  # read-only, or another's
        return f"cannot be used ({error.strerror or error})"


def files_bytes(model_path: str | None) -> int:
    """Returns the size of the weight files in a model's folder."""
    if model_path is None:
        return 0
    files = (path for kind in ("*.safetensors", "*.bin") for path in Path(model_path).glob(kind))
    return sum(path.stat().st_size for path in files)


class FolderReader(Protocol):
    """The reader of one replica; see WeightReader for the errors of both methods."""

    def prepare(self, version: int) -> MappedVersion | int:
        """Reads and checks a version while the engine generates; returns it for `place`."""
        ...

    def place(self, mapped: Any) -> SyncReport:
        """Gives the weights to the paused engine.  mapped: the return value of `prepare`."""
        ...

    def close(self) -> None:
        """Releases what the reader keeps besides the engine.  Idempotent."""
        ...


def folder_reader(
    engine: RolloutEngine, folder: Path | str, *, bucket_bytes: int, timeout_s: float, device: torch.device | None = None
) -> FolderReader:
    """Returns the reader for this engine.

    folder: where the versions are: a folder, or the addresses of the training ranks.  device: the GPU over which versions come
    from those; None leaves GPUs alone.
    """
    if isinstance(folder, str) and folder.startswith(SCHEME):
        mirror = Mirror(folder, timeout_s=timeout_s, device=device or torch.device("cpu"))
        return MirrorReader(engine, mirror, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    folder = Path(folder)
    if isinstance(engine, ExternalWeights):
        return WorkersReader(engine, folder, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    return WeightReader(engine, folder, bucket_bytes=bucket_bytes, timeout_s=timeout_s)


class MirrorReader:
    """Reads a version from this process's mirror of the training ranks' folders, once it is there."""

    def __init__(self, engine: RolloutEngine, mirror: Mirror, *, bucket_bytes: int, timeout_s: float) -> None:
        self._mirror = mirror
        self._reader = folder_reader(engine, mirror.folder, bucket_bytes=bucket_bytes, timeout_s=timeout_s)

    def prepare(self, version: int) -> MappedVersion | int:
        """Gets the version from all training ranks, and reads and checks it."""
        self._mirror.fetch(version)
        with self._mirror.answering(version):
            return self._reader.prepare(version)

    def place(self, mapped: Any) -> SyncReport:
        return self._reader.place(mapped)

    def close(self) -> None:
        self._reader.close()
        self._mirror.close()


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
            fallbacks=max(report.fallbacks for report in reports),
        )

    def close(self) -> None:
        """Does nothing: the workers' readers end with the workers."""

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
