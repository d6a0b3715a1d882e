"""Writes files that are either complete or absent, at whatever moment the process or the machine fails.

A file is written under a temporary name, flushed to the disk, and renamed to its final name; then the folder is flushed, so that
the rename itself survives a power loss.  Only the standard library is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TEMPORARY_SUFFIX = ".part"
READABLE = 0o644
"""Permissions to write for the owner and to read for all, less those that the process's umask removes."""


def write_bytes(path: Path, data: bytes, *, mode: int = READABLE) -> None:
    """Replaces `path` by a file with `data`; readers see the old file or the new one, never a part.

    mode: the permissions of the new file, whatever the old file's were.  Raises OSError (disk full, read-only folder), with the
    old file unchanged.
    """
    aside = path.with_name(path.name + TEMPORARY_SUFFIX)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        if mode != READABLE:
            os.fchmod(descriptor, mode)  # of a part that a killed write has left, too
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(aside, path)
    fsync_folder(path.parent)


def write_text(path: Path, text: str, *, mode: int = READABLE) -> None:
    """Writes UTF-8 text as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8"), mode=mode)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes indented JSON as `write_bytes` does.  Raises TypeError if JSON cannot represent `value`."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes every byte of `data`: `os.write` may write fewer than it is given (signals, and 2 GiB at most on Linux)."""
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


def fsync_file(path: Path) -> None:
    """Flushes a file that another program wrote to the disk."""
    _fsync(path, os.O_RDONLY)


def fsync_folder(path: Path) -> None:
    """Flushes a folder's list of names to the disk, so that files created in it or renamed into it stay there."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
