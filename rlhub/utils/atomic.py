"""Files that are either whole or not there, whatever moment the process or the machine dies at.

A file is written under a temporary name, flushed to the disk, renamed over its final name, and the folder is flushed so
that the rename itself survives a power loss.  Only the standard library is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TEMPORARY_SUFFIX = ".part"
READABLE = 0o644
"""For its owner to write and for all to read, less what the process's umask takes away."""


def write_bytes(path: Path, data: bytes, *, mode: int = READABLE) -> None:
    """Replace `path` by a file holding `data`; readers see the old file or the new one, never a part.

    mode: who may read it, whatever the old file's was.  Raises OSError (disk full, read-only folder) with the old file untouched.
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
    """`write_bytes` of UTF-8 text."""
    write_bytes(path, text.encode("utf-8"), mode=mode)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """`write_bytes` of indented JSON; TypeError when `value` holds something JSON has no form for."""
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte of `data`: `os.write` may take fewer than it is given (signals, and 2 GiB at most on Linux)."""
    rest = memoryview(data).cast("B")
    while len(rest):
        rest = rest[os.write(descriptor, rest) :]


def fsync_file(path: Path) -> None:
    """Flush a file that another program wrote to the disk."""
    _fsync(path, os.O_RDONLY)


def fsync_folder(path: Path) -> None:
    """Flush a folder's list of names to the disk, so that files created in it or renamed into it stay there."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
