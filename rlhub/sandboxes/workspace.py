"""The folder of a sandbox on the host.  Its content is written by code that is not trusted, so nothing here follows a link.

A path is walked folder by folder through descriptors, each opened with O_NOFOLLOW: a symbolic link on the way, wherever it leads
and however often it is swapped, is an error.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import stat
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from rlhub.sandboxes.base import WORKSPACE, SandboxError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a FIFO must not block the host
ENTRY_BYTES = 4096  # that an entry costs beside its content, so that empty files are counted
PREFIX = "rlhub-{}-"  # with the kind of sandbox


class Workspace:
    """A new folder, open to this user only, with `work` and `tmp` for the sandbox, locked while this process has it.

    kind: of the sandbox, since each kind knows how to remove its own.  owner: the user id that owns these two, None for this
    process's own.
    """

    def __init__(self, kind: str, owner: int | None = None) -> None:
        self._root, self._owner = Path(tempfile.mkdtemp(prefix=PREFIX.format(kind))), owner
        lock = os.open(self._root, FOLDER)
        self._unlock = weakref.finalize(self, os.close, lock)
        with suppress(OSError):  # some file systems have no locks: there stays what a killed process has left
            fcntl.flock(lock, fcntl.LOCK_EX)
        self.work, self.tmp = self._root / "work", self._root / "tmp"
        for folder in (self.work, self.tmp):
            folder.mkdir(mode=0o700)
            if owner is not None:
                os.chown(folder, owner, owner)

    @property
    def name(self) -> str:
        """Returns a name that no other sandbox of this machine has."""
        return self._root.name

    def write(self, path: str, data: bytes, most: int) -> None:
        """Writes a regular file of at most `most` bytes and creates the folders above it.  Raises SandboxError."""
        if len(data) > most:
            raise SandboxError(f"{path}: {len(data)} bytes, over the limit of {most}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | FILE
        with self._opened(path, flags, create=True) as fd:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]

    def read(self, path: str, most: int) -> bytes:
        """Returns the content of a regular file of at most `most` bytes.  Raises SandboxError."""
        with self._opened(path, os.O_RDONLY | FILE, create=False) as fd, open(fd, "rb", closefd=False) as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise SandboxError(f"{path}: larger than {most} bytes")
        return data

    def used_bytes(self, most: int) -> int:
        """Returns the bytes on disk of everything inside, or any number above `most` once there is more."""
        used = 0
        try:
            for _, folders, files, fd in os.fwalk(self._root, follow_symlinks=False):
                used += ENTRY_BYTES * (len(folders) + len(files))
                used += sum(_blocks(name, fd) for name in files)
                if used > most:
                    break
        except RecursionError:
            return most + 1
        return used

    def remove(self) -> None:
        """Removes the folder, whatever depth and permissions its content has.  Idempotent."""
        _remove(self._root)
        self._unlock()

    @contextmanager
    def _opened(self, path: str, flags: int, *, create: bool) -> Iterator[int]:
        *folders, name = _parts(path)
        opened: list[int] = []
        try:
            opened.append(os.open(self.work, FOLDER))
            for folder in folders:
                opened.append(self._step(opened[-1], folder, create=create))
            opened.append(os.open(name, flags, 0o600, dir_fd=opened[-1]))
            if not stat.S_ISREG(os.fstat(opened[-1]).st_mode):
                raise SandboxError(f"{path}: not a regular file")
            if create and self._owner is not None:
                os.fchown(opened[-1], self._owner, self._owner)
            yield opened[-1]
        except OSError as error:
            raise SandboxError(f"{path}: {error.strerror}; links are not followed") from error
        finally:
            for fd in opened:
                os.close(fd)

    def _step(self, parent: int, folder: str, *, create: bool) -> int:
        try:
            return os.open(folder, FOLDER, dir_fd=parent)
        except FileNotFoundError:
            if not create:
                raise
        os.mkdir(folder, 0o700, dir_fd=parent)
        fd = os.open(folder, FOLDER, dir_fd=parent)
        if self._owner is not None:
            os.fchown(fd, self._owner, self._owner)
        return fd


@functools.cache
def clean_up(kind: str, first: Callable[[str], bool]) -> None:
    """Calls `remove_left` once, beside the first sandboxes: folders may hold gigabytes, and a daemon may take its time."""
    threading.Thread(target=remove_left, args=(kind, first), name="left sandboxes", daemon=True).start()


def remove_left(kind: str, first: Callable[[str], bool]) -> None:
    """Removes the folders of a kind of sandbox that killed processes have left: nobody holds their locks.

    first: is called with the name of each, and removes what else there is of its sandbox; it returns whether all of it is gone,
    otherwise the folder stays for a later look.
    """
    for root in Path(tempfile.gettempdir()).glob(f"{PREFIX.format(kind)}*"):
        with suppress(OSError):  # of another user, or removed meanwhile, or locked
            lock = os.open(root, FOLDER)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (root / "work").exists() and first(root.name):  # without it, it is not locked yet
                    _remove(root)
            finally:
                os.close(lock)


def _remove(root: Path) -> None:
    try:
        shutil.rmtree(root)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwX", str(root)], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", str(root)], check=False, stderr=subprocess.DEVNULL)


def _parts(path: str) -> tuple[str, ...]:
    """Returns the names below the workspace.  Raises SandboxError for a path that is not below it."""
    given = PurePosixPath(WORKSPACE, path)
    if not given.is_relative_to(WORKSPACE) or ".." in given.parts or given == PurePosixPath(WORKSPACE) or "\0" in path:
        raise SandboxError(f"{path!r}: no path of a file below {WORKSPACE}")
    return given.relative_to(WORKSPACE).parts


def _blocks(name: str, folder: int) -> int:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_blocks * 512
    except OSError:  # removed meanwhile
        return 0
