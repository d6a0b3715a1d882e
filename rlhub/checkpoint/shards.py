"""Sharded tensors on disk: every rank writes its pieces, and any number of ranks reads any pieces.

Rank r of a save writes `shards-rank<r>-<k>.safetensors` and `shards-rank<r>.json`, an index that gives the tensor and region
of each piece and the number of ranks that wrote, so that the loss of a whole rank's files is detected.  A reader
(`shard_reader`) knows only the indexes, so it does not matter how the writers had cut the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhub.checkpoint.files import FileEntry, RawTensor, write_file, write_safetensors
from rlhub.errors import CheckpointError
from rlhub.protocol.weights.pieces import Piece, Region, intersection, num_elements

FORMAT_VERSION = 2
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


def index_name(rank: int) -> str:
    """Returns the file name of a rank's index."""
    return f"shards-rank{rank:05d}.json"


def raw_tensor(name: str, tensor: Tensor) -> RawTensor:
    """Describes a tensor for `write_safetensors`; contiguous CPU memory is read in place, other memory is copied."""
    if tensor.dtype not in DTYPE_CODES:
        raise CheckpointError(f"{name}: dtype {tensor.dtype} has no form in a checkpoint; known: {sorted(DTYPE_CODES.values())}")

    def data() -> memoryview:
        dense = tensor.detach().to("cpu").contiguous()
        flat = dense.as_strided((dense.numel(),), (1,))  # reshape keeps odd strides of a single element, which no view takes
        return flat.view(torch.uint8).numpy().data

    num_bytes = tensor.numel() * tensor.element_size()
    return RawTensor(name=name, dtype=DTYPE_CODES[tensor.dtype], shape=tuple(tensor.shape), num_bytes=num_bytes, data=data)


def write_shards(
    folder: Path, rank: int, num_ranks: int, pieces: Iterable[Piece], *, max_file_bytes: int = MAX_FILE_BYTES
) -> list[FileEntry]:
    """Writes this rank's pieces into `folder`; each of the `num_ranks` ranks calls it with its own number and the same folder.

    A piece's memory is read when its file is written and must stay unchanged until then; contiguous CPU memory is not copied.
    The stream is consumed a file at a time, so at most `max_file_bytes` of it is in memory.  Blocks until everything is on the
    disk.  Raises CheckpointError for a full disk, and for a piece that is outside its tensor or overlaps another one of this
    rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer(folder, rank)
    for piece in pieces:
        if writer.batch and writer.file_bytes + piece.info.num_bytes > max_file_bytes:
            writer.flush()
        writer.add(piece)
    writer.flush()
    index = {"version": FORMAT_VERSION, "rank": rank, "num_ranks": num_ranks, "tensors": writer.index}
    text = json.dumps(index, separators=(",", ":"))
    return [*writer.entries, write_file(folder / index_name(rank), text.encode("utf-8"))]


@dataclass(slots=True)
class _Writer:
    """The file that is being filled, and the index of this rank so far."""

    folder: Path
    rank: int
    entries: list[FileEntry] = field(default_factory=list)
    index: dict[str, dict[str, Any]] = field(default_factory=dict)
    batch: list[RawTensor] = field(default_factory=list)
    file_bytes: int = 0

    @property
    def file(self) -> str:
        return f"shards-rank{self.rank:05d}-{len(self.entries):05d}.safetensors"

    def add(self, piece: Piece) -> None:
        """Adds the piece to the index and to the file; one without elements only adds its tensor to the index."""
        raw = raw_tensor(piece.name, piece.tensor)
        known = self.index.setdefault(piece.name, {"dtype": raw.dtype, "shape": list(piece.shape), "pieces": []})
        _check(piece, raw, known)
        if not raw.num_bytes:
            return
        raw = raw_tensor(_key(piece.name, len(known["pieces"])), piece.tensor)
        known["pieces"].append({"file": self.file, "key": raw.name, "region": [list(bounds) for bounds in piece.region]})
        self.batch.append(raw)
        self.file_bytes += raw.num_bytes

    def flush(self) -> None:
        """Writes the file, unless it would be empty."""
        if self.batch:
            self.entries.append(write_safetensors(self.folder / self.file, self.batch))
            self.batch, self.file_bytes = [], 0


def _key(name: str, number: int) -> str:
    """Returns the key of a piece in its file; a rank's first piece of a tensor has the tensor's own name."""
    return f"{name}#{number}" if number else name


def _check(piece: Piece, raw: RawTensor, known: dict[str, Any]) -> None:
    if not _is_inside(piece.region, piece.shape):
        raise CheckpointError(f"{piece.name}: the piece {list(piece.region)} does not fit in a tensor of shape {piece.shape}")
    if (raw.dtype, list(piece.shape)) != (known["dtype"], known["shape"]):
        raise CheckpointError(
            f"{piece.name}: a piece of {raw.dtype} {list(piece.shape)} after one of {known['dtype']} {known['shape']}"
        )
    for other in known["pieces"]:
        if num_elements(piece.region) and intersection(as_region(other["region"]), piece.region) is not None:
            raise CheckpointError(
                f"{piece.name}: the piece {list(piece.region)} covers elements of {other['region']}, another piece of this rank"
            )


def _is_inside(region: Region, shape: tuple[int, ...]) -> bool:
    return len(region) == len(shape) and all(
        0 <= start <= stop <= size for (start, stop), size in zip(region, shape, strict=True)
    )


def as_region(bounds: list[list[int]]) -> Region:
    """Returns a region from its JSON form."""
    return tuple((start, stop) for start, stop in bounds)
