"""Sharded tensors on disk: every rank writes the rows it holds, any number of ranks reads any rows.

Rank r of a save writes `shards-rank<r>-<k>.safetensors` and `shards-rank<r>.json`, an index that says of each piece
which rows of which global tensor it is.  A reader knows only the indexes: the world size of the save never matters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhub.checkpoint.files import FileEntry, RawTensor, storage_errors, write_file, write_safetensors
from rlhub.errors import CheckpointError
from rlhub.registry import suggest

FORMAT_VERSION = 1
MAX_FILE_BYTES = 4 << 30  # keeps single files movable; pieces are never split
DTYPE_CODES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(slots=True, kw_only=True)
class TensorShard:
    """This rank's piece of a named tensor: rows [offset, offset + local.shape[0]) of dimension 0 of `global_shape`.

    `local` may be a view of live memory: copy before the next optimizer step.  A scalar has global_shape ().
    `replicated` pieces are the same on every rank; only rank 0 needs to write them.
    """

    name: str
    local: Tensor
    global_shape: tuple[int, ...]
    offset: int = 0
    replicated: bool = False


@dataclass(slots=True, kw_only=True, frozen=True)
class _Piece:
    """Rows [start, stop) of a tensor, and the file they are in."""

    file: Path
    start: int
    stop: int


@dataclass(slots=True, kw_only=True)
class _Stored:
    """What all indexes together say of one tensor; pieces sorted by first row, then longest first."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[_Piece]


def raw_tensor(name: str, tensor: Tensor) -> RawTensor:
    """Describe a tensor for `write_safetensors`; CPU memory is read in place, other devices are copied one at a time."""
    if tensor.dtype not in DTYPE_CODES:
        raise CheckpointError(f"{name}: dtype {tensor.dtype} has no form in a checkpoint; known: {sorted(DTYPE_CODES.values())}")

    def data() -> memoryview:
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data

    num_bytes = tensor.numel() * tensor.element_size()
    return RawTensor(name=name, dtype=DTYPE_CODES[tensor.dtype], shape=tuple(tensor.shape), num_bytes=num_bytes, data=data)


def write_shards(
    folder: Path, rank: int, shards: Iterable[TensorShard], *, max_file_bytes: int = MAX_FILE_BYTES
) -> list[FileEntry]:
    """Write this rank's pieces below `folder`; every rank of the save calls it with its own number, into one folder.

    Pieces marked `replicated` are written by rank 0 alone.  The stream is consumed a file at a time, so at most
    `max_file_bytes` of it is held.  Blocks until everything is on the disk.  Raises CheckpointError (disk full, a name
    twice, a piece that does not fit its global shape).
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries: list[FileEntry] = []
    index: dict[str, dict[str, Any]] = {}
    batch: list[TensorShard] = []
    held = 0
    for shard in shards:
        _check_piece(shard, index)
        if shard.replicated and rank != 0:
            continue
        num_bytes = shard.local.numel() * shard.local.element_size()
        if batch and held + num_bytes > max_file_bytes:
            entries.append(_write_batch(folder, rank, len(entries), batch, index))
            batch, held = [], 0
        batch.append(shard)
        held += num_bytes
        index[shard.name] = {}  # claimed; filled in when its file is known
    if batch:
        entries.append(_write_batch(folder, rank, len(entries), batch, index))
    text = json.dumps({"version": FORMAT_VERSION, "rank": rank, "pieces": index}, separators=(",", ":"))
    entries.append(write_file(folder / f"shards-rank{rank:05d}.json", text.encode("utf-8")))
    return entries


def _check_piece(shard: TensorShard, index: dict[str, dict[str, Any]]) -> None:
    if shard.name in index:
        raise CheckpointError(f"two pieces of {shard.name!r} on one rank: join them or give them different names")
    shape, local = shard.global_shape, tuple(shard.local.shape)
    fits = len(local) == len(shape) and local[1:] == shape[1:]
    if fits and shape:
        fits = shard.offset >= 0 and shard.offset + local[0] <= shape[0]
    if not fits:
        raise CheckpointError(f"{shard.name}: a piece of shape {local} at row {shard.offset} does not fit in {shape}")


def _write_batch(folder: Path, rank: int, number: int, batch: list[TensorShard], index: dict[str, dict[str, Any]]) -> FileEntry:
    name = f"shards-rank{rank:05d}-{number:05d}.safetensors"
    for shard in batch:
        rows = shard.local.shape[0] if shard.global_shape else 1
        index[shard.name] = {
            "file": name,
            "dtype": DTYPE_CODES.get(shard.local.dtype, "?"),
            "shape": list(shard.global_shape),
            "start": shard.offset,
            "stop": shard.offset + rows,
        }
    return write_safetensors(folder / name, [raw_tensor(shard.name, shard.local) for shard in batch])


class ShardReader:
    """Reads slices of the tensors that any number of ranks wrote into `folder`.

    Files are memory-mapped: only the rows asked for are read.  Use it as a context manager, or call `close`, to let the
    mappings go.  Raises CheckpointError when an index is missing or unreadable.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self._stored: dict[str, _Stored] = {}
        paths = sorted(folder.glob("shards-rank*.json"))
        if not paths:
            raise CheckpointError(f"{folder}: no shard index (shards-rank*.json) here; is this a folder of a checkpoint?")
        for path in paths:
            self._add_index(path)
        for stored in self._stored.values():
            stored.pieces.sort(key=lambda piece: (piece.start, -piece.stop))

    def _add_index(self, path: Path) -> None:
        with storage_errors(f"reading {path}"):
            text = path.read_bytes()
        try:
            index = json.loads(text)
            version, pieces = index["version"], index["pieces"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: not a shard index ({error}); the checkpoint is corrupt, use an earlier one"
            ) from error
        if version != FORMAT_VERSION:
            raise CheckpointError(f"{path}: written in format {version}, this rlhub reads format {FORMAT_VERSION}")
        for name, row in pieces.items():
            stored = self._stored.setdefault(name, _Stored(dtype=row["dtype"], shape=tuple(row["shape"]), pieces=[]))
            if (stored.dtype, stored.shape) != (row["dtype"], tuple(row["shape"])):
                raise CheckpointError(
                    f"{path}: {name} is {row['dtype']} {row['shape']} here, {stored.dtype} {stored.shape} before"
                )
            stored.pieces.append(_Piece(file=self.folder / row["file"], start=row["start"], stop=row["stop"]))

    def names(self) -> list[str]:
        """Names of all tensors stored, sorted."""
        return sorted(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a stored tensor."""
        return self._find(name).shape

    def read(self, shard: TensorShard) -> Tensor:
        """Rows [offset, offset + local.shape[0]) of `shard.name`, a new CPU tensor of `local`'s shape and dtype.

        `local` is only looked at, never written; a tensor on the meta device will do.  Raises CheckpointError when the
        name is unknown, shape or dtype differ, or some row was never written.
        """
        stored = self._find(shard.name)
        if stored.shape != tuple(shard.global_shape):
            raise CheckpointError(
                f"{shard.name}: the checkpoint in {self.folder} has shape {stored.shape}, expected {tuple(shard.global_shape)}; "
                "it is of another model"
            )
        expected = DTYPE_CODES.get(shard.local.dtype, str(shard.local.dtype))
        if stored.dtype != expected:
            raise CheckpointError(
                f"{shard.name}: the checkpoint in {self.folder} holds {stored.dtype}, expected {expected}; "
                "resume with the model_dtype it was written with"
            )
        if not stored.shape:
            return self._tensor(stored.pieces[0], shard.name)
        return self._rows(stored, shard)

    def _find(self, name: str) -> _Stored:
        if name not in self._stored:
            raise CheckpointError(f"{name!r} is not in the checkpoint {self.folder}{suggest(name, self._stored)}")
        return self._stored[name]

    def _rows(self, stored: _Stored, shard: TensorShard) -> Tensor:
        """Join the pieces that cover the rows asked for; pieces may overlap (replicas), then the longest is read."""
        position, stop = shard.offset, shard.offset + shard.local.shape[0]
        result = torch.empty(shard.local.shape, dtype=shard.local.dtype)
        while position < stop:
            covering = [piece for piece in stored.pieces if piece.start <= position < piece.stop]
            if not covering:
                raise CheckpointError(
                    f"{shard.name}: row {position} of {stored.shape} is in no file of {self.folder}; "
                    "the save of some rank is missing"
                )
            piece = max(covering, key=lambda candidate: candidate.stop)
            upto = min(stop, piece.stop)
            rows = self._handle(piece.file).get_slice(shard.name)[position - piece.start : upto - piece.start]
            result[position - shard.offset : upto - shard.offset] = rows
            position = upto
        return result

    def _tensor(self, piece: _Piece, name: str) -> Tensor:
        tensor: Tensor = self._handle(piece.file).get_tensor(name)
        return tensor.clone()

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read as safetensors ({error}); use an earlier checkpoint") from error
        return self._open[path]

    def close(self) -> None:
        """Let the files go."""
        self._open.clear()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
