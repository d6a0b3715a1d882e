"""A lock for each server, so that of several engines of a job, ranks or replicas, one brings it each version of the weights.

<folder>/.<name>   locked (flock) by the engine that brings them; records which weights the server has, nothing while they change

What it records when an engine comes is not believed by that engine: the server may have been restarted since, with other weights.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rlhub.errors import DeadlineError, EngineError

POLL_S = 0.05


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
            time.sleep(POLL_S)


def _read(file: int) -> Loaded | None:
    try:
        return Loaded(*json.loads(os.pread(file, os.fstat(file).st_size, 0)))
    except (ValueError, TypeError):  # empty, or cut short: whoever wrote it has ended in the middle
        return None
