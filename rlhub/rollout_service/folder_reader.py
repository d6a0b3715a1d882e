"""How a rollout engine of any kind takes its weights from a folder: by one who reads beside it, or by one in each of its workers.

Both read in two halves (see sharding_manager.files): `prepare` while the engine generates, `place` while it is paused.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from rlhub.engines.rollout.base import RolloutEngine
from rlhub.engines.rollout.elsewhere import WeightsElsewhere
from rlhub.errors import EngineError, RlhubError
from rlhub.protocol.weights.fingerprint import combine
from rlhub.sharding_manager.files import MappedVersion, WeightReader
from rlhub.sharding_manager.route import SyncReport

FIRST_POLL_S, LONGEST_POLL_S = 0.01, 0.2  # a look at the workers falls between two of their steps


class FolderReader(Protocol):
    """What a replica asks of a reader; see WeightReader for what both methods raise."""

    def prepare(self, version: int) -> MappedVersion | int: ...

    def place(self, mapped: Any) -> SyncReport:
        """mapped: what `prepare` returned."""
        ...


def folder_reader(engine: RolloutEngine, folder: Path, *, bucket_bytes: int, timeout_s: float) -> FolderReader:
    """For this engine."""
    if isinstance(engine, WeightsElsewhere):
        return WorkersReader(engine, folder, bucket_bytes=bucket_bytes, timeout_s=timeout_s)
    return WeightReader(engine, folder, bucket_bytes=bucket_bytes, timeout_s=timeout_s)


class WorkersReader:
    """A reader in every worker of the engine: each maps the files, takes its own parts and compares what it then holds."""

    def __init__(self, engine: WeightsElsewhere, folder: Path, *, bucket_bytes: int, timeout_s: float) -> None:
        self._engine = engine
        self._settings = (str(folder), bucket_bytes, timeout_s)

    def prepare(self, version: int) -> int:
        """The version, ready to be placed in all workers."""
        self._call("begin", version, *self._settings)
        pause_s = FIRST_POLL_S
        while not all(self._call("prepared")):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
        return version

    def place(self, mapped: int) -> SyncReport:
        """The report's fingerprint is the writer's where there is one worker, else of all workers' parts."""
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
    """One worker's; called between two steps, so what takes long runs in a thread, beside the next steps."""

    def __init__(self, weights: Any) -> None:
        """weights: of the worker, with the methods of RolloutEngine that WeightReader uses."""
        self._weights = weights
        self._settings: tuple[str, int, float] | None = None
        self._reader: WeightReader | None = None
        self._thread: threading.Thread | None = None
        self._mapped: MappedVersion | None = None
        self._error: BaseException | None = None

    def begin(self, version: int, folder: str, bucket_bytes: int, timeout_s: float) -> None:
        """Start to prepare the version."""
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
        """Whether the version is ready; raises what preparing it raised."""
        if self._error is not None:
            raise as_rlhub_error(self._error)
        return self._mapped is not None

    def place(self, version: int) -> SyncReport:
        """Copy it; the engine is paused."""
        if self._reader is None or self._mapped is None or self._mapped.version != version:
            raise EngineError(f"version {version} of the weights has not been prepared in this worker")
        mapped, self._mapped = self._mapped, None
        return self._reader.place(mapped)


def as_rlhub_error(error: BaseException) -> RlhubError:
    """So that it reaches the replica with its type where that is ours."""
    if isinstance(error, RlhubError):
        return error
    return EngineError(f"reading the weights failed in a worker: {type(error).__name__}: {error}")
