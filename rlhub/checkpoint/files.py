"""Checkpoint files: the entry that records each file, and a safetensors writer that hashes while it writes.

The format is that of safetensors (8-byte little-endian header length, JSON header, raw tensors without holes).  rlhub writes
it itself, so that one pass over memory writes, checksums and flushes, and nothing is copied:
https://github.com/huggingface/safetensors#format.  This module loads no torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from rlhub.errors import CheckpointError
from rlhub.utils import faults
from rlhub.utils.atomic import write_all

CHECKSUM = "xxh3_128"
READ_BYTES = 8 << 20


@dataclass(slots=True, kw_only=True, frozen=True)
class FileEntry:
    """One file of a checkpoint, as its writer recorded it.

    path: absolute when a writer returns it; relative to the checkpoint's folder once it is in a manifest.
    size: in bytes.
    checksum: `xxh3_128:<hex>` over the whole file.
    """

    path: str
    size: int
    checksum: str


@dataclass(slots=True, kw_only=True, frozen=True)
class RawTensor:
    """A tensor as bytes.

    dtype: the code of safetensors: F32, BF16, I64, ...
    data: returns the contiguous little-endian memory; called once, when the tensor is written.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    data: Callable[[], memoryview]


@contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turns an OSError (disk full, no permission, vanished folder) into a CheckpointError that names the action `what`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{what}: {error.strerror or error} ({error.filename or 'no file named'}); "
            "free space, or point trainer.default_local_dir at a writable folder"
        ) from error


def write_safetensors(path: Path, tensors: Sequence[RawTensor], metadata: dict[str, str] | None = None) -> FileEntry:
    """Writes and flushes one safetensors file; returns its entry.  Names must differ.

    Wide dtypes come first, so that every tensor starts at a multiple of its item size.
    """
    ordered = sorted(tensors, key=lambda raw: (-_item_bytes(raw), raw.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    position = 0
    for raw in ordered:
        if raw.name in header:
            raise CheckpointError(f"{path}: two tensors are called {raw.name!r}")
        header[raw.name] = {
            "dtype": raw.dtype,
            "shape": list(raw.shape),
            "data_offsets": [position, position + raw.num_bytes],
        }
        position += raw.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return _write_hashed(path, [lambda: memoryview(len(text).to_bytes(8, "little") + text), *(raw.data for raw in ordered)])


def _item_bytes(raw: RawTensor) -> int:
    count = 1
    for length in raw.shape:
        count *= length
    return raw.num_bytes // count if count else 1


def _write_hashed(path: Path, parts: Iterable[Callable[[], memoryview]]) -> FileEntry:
    digest = xxhash.xxh3_128()
    size = 0
    with storage_errors(f"writing {path}"):
        faults.at("checkpoint.write")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for part in parts:
                data = part()
                digest.update(data)
                write_all(descriptor, data)
                size += data.nbytes
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    faults.at("checkpoint.written", path=path)
    return FileEntry(path=str(path.absolute()), size=size, checksum=f"{CHECKSUM}:{digest.hexdigest()}")


def write_file(path: Path, data: bytes) -> FileEntry:
    """Writes and flushes a small file of a checkpoint; returns its entry."""
    return _write_hashed(path, [lambda: memoryview(data)])


def entry_of(path: Path) -> FileEntry:
    """Reads a file that another program wrote; returns its entry.  Raises OSError if the file cannot be read."""
    digest = xxhash.xxh3_128()
    size = 0
    with open(path, "rb", buffering=0) as stream:
        while block := stream.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(path=str(path.absolute()), size=size, checksum=f"{CHECKSUM}:{digest.hexdigest()}")


def problem_with(path: Path, entry: FileEntry, *, verify: bool) -> str | None:
    """Returns why the file at `path` is not the recorded one, or None.  verify: False compares sizes only."""
    try:
        size = path.stat().st_size
        if size != entry.size:
            return f"{entry.path} has {size} bytes, its manifest says {entry.size}"
        if verify and entry_of(path).checksum != entry.checksum:
            return f"{entry.path} has another checksum than its manifest says: its content changed after it was written"
    except OSError as error:
        return f"{entry.path}: {error.strerror or error}"
    return None
