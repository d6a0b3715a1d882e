"""The folder through which a run publishes its weights to the rollout service.

On one machine it is in memory.  Memory is not freed when a process is killed, so such a folder has a lock that goes away with
the process that holds it, and each run removes the folders of those that ended.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import uuid
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rlhub-weights-"
BELOW_RUN = f"{PREFIX}in-flight"
"""Name in the run folder, where there is no such memory; it is removed at the end, so it is none that a user would choose."""
ROOM_FACTOR = 6
"""Free memory asked for, as a multiple of the model's files: three versions (two are kept while the next is written) of weights
that may be float32 where the files are bfloat16."""


class WeightsFolder:
    """path: where versions are written.  `close` removes what this process made."""

    def __init__(self, path: Path, lock: int | None = None, *, temporary: bool) -> None:
        self.path = path
        self._lock, self._temporary = lock, temporary
        path.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Idempotent."""
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            _lock_file(self.path).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def open_weights_folder(
    configured: str | None, *, one_machine: bool, run_folder: Path, model_bytes: int, memory: Path = SHARED_MEMORY
) -> WeightsFolder:
    """The configured folder, which stays; else one in this machine's memory, or below the run folder where replicas are on
    other machines or the memory is small.  model_bytes: of the model's files, 0 if not known."""
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
    """Of the weights in a model's folder."""
    if model_path is None:
        return 0
    files = (path for kind in ("*.safetensors", "*.bin") for path in Path(model_path).glob(kind))
    return sum(path.stat().st_size for path in files)


def remove_abandoned(memory: Path = SHARED_MEMORY) -> None:
    """Folders whose process has ended."""
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
    new = path.with_name(path.name + ".new")  # nobody finds the file before it is locked
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(_lock_file(path))
    return WeightsFolder(path, lock, temporary=True)


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + ".lock")
