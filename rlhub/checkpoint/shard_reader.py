"""Reading any region of a tensor from the pieces that any number of ranks has written (`shards`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhub.checkpoint.files import storage_errors
from rlhub.checkpoint.shards import DTYPE_CODES, FORMAT_VERSION, as_region, index_name
from rlhub.errors import CheckpointError
from rlhub.protocol.weights.pieces import Piece, Region, intersection, num_elements, relative, remainder, sizes, take, whole
from rlhub.registry import suggest

ROWS_VERSION = 1
"""The format before regions: each rank had at most one run of rows of a tensor, and did not know of the other ranks."""
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}


@dataclass(slots=True, kw_only=True, frozen=True)
class _StoredRegion:
    """A region of a tensor, and the file and key of its elements."""

    file: Path
    key: str
    region: Region


@dataclass(slots=True, kw_only=True)
class _StoredTensor:
    """A stored tensor, as all indexes together describe it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[_StoredRegion] = field(default_factory=list)


class ShardReader:
    """Reads regions of the tensors that were written into `folder`.

    Files are memory-mapped, so only requested regions are read.  Use it as a context manager, or call `close`, to end the
    mappings.  The content is not compared with the checksums of the checkpoint's manifest: `CheckpointStore.latest` or
    `open_checkpoint` has done that for all files at once.

    Raises CheckpointError if there is no index, one cannot be read, or that of a rank is missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self._stored: dict[str, _StoredTensor] = {}
        paths = sorted(folder.glob("shards-rank*.json"))
        if not paths:
            raise CheckpointError(f"{folder}: no shard index (shards-rank*.json) here; is this a folder of a checkpoint?")
        self._check_ranks({path.name: self._add_index(path) for path in paths})

    def _check_ranks(self, num_ranks: dict[str, int | None]) -> None:
        """Raises CheckpointError unless the indexes of all ranks are present; every index contains the number of ranks that
        wrote."""
        known = {count for count in num_ranks.values() if count is not None}
        if len(known) > 1:
            raise CheckpointError(f"{self.folder}: files of several saves, by {sorted(known)} ranks; use another checkpoint")
        missing = [index_name(rank) for count in known for rank in range(count) if index_name(rank) not in num_ranks]
        if missing:
            raise CheckpointError(
                f"{self.folder}: was written by {known.pop()} ranks, but {', '.join(missing)} of them is missing; "
                "restore the file or use an earlier checkpoint"
            )

    def _add_index(self, path: Path) -> int | None:
        """Adds the index of one rank; returns the number of ranks, or None if the format does not contain it."""
        with storage_errors(f"reading {path}"):
            text = path.read_bytes()
        try:
            index = json.loads(text)
            version = index["version"]
            if version not in (ROWS_VERSION, FORMAT_VERSION):
                raise CheckpointError(f"{path}: written in format {version}, this rlhub reads up to format {FORMAT_VERSION}")
            for name, row in (_from_rows(index) if version == ROWS_VERSION else index["tensors"]).items():
                self._add_tensor(path, name, row)
            return None if version == ROWS_VERSION else int(index["num_ranks"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path}: not a shard index ({error}); the checkpoint is corrupt, use an earlier one"
            ) from error

    def _add_tensor(self, path: Path, name: str, row: dict[str, Any]) -> None:
        shape = tuple(row["shape"])
        stored = self._stored.setdefault(name, _StoredTensor(dtype=row["dtype"], shape=shape))
        if (stored.dtype, stored.shape) != (row["dtype"], shape):
            raise CheckpointError(f"{path}: {name} is {row['dtype']} {shape} here, {stored.dtype} {stored.shape} before")
        stored.pieces += [
            _StoredRegion(file=self.folder / piece["file"], key=piece["key"], region=as_region(piece["region"]))
            for piece in row["pieces"]
        ]

    def names(self) -> list[str]:
        """Returns the names of all stored tensors, sorted."""
        return sorted(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the full shape of a stored tensor."""
        return self._find(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of a stored tensor."""
        return DTYPES[self._find(name).dtype]

    def read(self, piece: Piece) -> Tensor:
        """Reads the piece's region; returns a new CPU tensor of its sizes and dtype.

        `piece.tensor` gives only sizes and dtype, so a tensor on the meta device will do.  Raises CheckpointError if the name
        is unknown, if shape or dtype differ, or if an element was never written.
        """
        stored = self._find(piece.name)
        if stored.shape != tuple(piece.shape):
            raise CheckpointError(
                f"{piece.name}: the checkpoint in {self.folder} has shape {stored.shape}, expected {tuple(piece.shape)}; "
                "it is of another model"
            )
        expected = DTYPE_CODES.get(piece.tensor.dtype, str(piece.tensor.dtype))
        if stored.dtype != expected:
            raise CheckpointError(
                f"{piece.name}: the checkpoint in {self.folder} holds {stored.dtype}, expected {expected}; "
                "resume with the model_dtype it was written with"
            )
        return self.region(piece.name, piece.region)

    def whole(self, name: str) -> Tensor:
        """Reads a whole tensor in its stored dtype."""
        return self.region(name, whole(self.shape(name)))

    def region(self, name: str, region: Region) -> Tensor:
        """Reads part of a tensor in its stored dtype, joined from pieces, which may overlap (replicas)."""
        stored = self._find(name)
        result = torch.empty(sizes(region), dtype=DTYPES[stored.dtype])
        missing = [region] if num_elements(region) else []
        for piece in stored.pieces:
            missing = [rest for box in missing for rest in self._copy(piece, box, take(result, relative(box, region)))]
        if missing:
            raise CheckpointError(
                f"{name}: {list(missing[0])} of its shape {stored.shape} is in no file of {self.folder}: "
                "the shard files of some rank are missing; use an earlier checkpoint"
            )
        return result

    def _copy(self, piece: _StoredRegion, box: Region, target: Tensor) -> Iterator[Region]:
        """Copies the part of `box` that the piece contains; yields the rest of `box`."""
        common = intersection(box, piece.region)
        if common is None:
            yield box
            return
        take(target, relative(common, box)).copy_(self._load(piece, relative(common, piece.region)))
        yield from remainder(box, common)

    def _load(self, piece: _StoredRegion, region: Region) -> Tensor:
        handle = self._handle(piece.file)
        try:
            if sizes(region) == sizes(piece.region):
                loaded: Tensor = handle.get_tensor(piece.key)
            else:
                loaded = handle.get_slice(piece.key)[tuple(slice(start, stop) for start, stop in region)]
        except SafetensorError as error:
            raise CheckpointError(f"{piece.file}: {piece.key} cannot be read ({error}); use an earlier checkpoint") from error
        if tuple(loaded.shape) != sizes(region):
            raise CheckpointError(f"{piece.file}: {piece.key} is not {list(sizes(piece.region))}, as its index says")
        return loaded

    def _find(self, name: str) -> _StoredTensor:
        if name not in self._stored:
            raise CheckpointError(f"{name!r} is not in the checkpoint {self.folder}{suggest(name, self._stored)}")
        return self._stored[name]

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(str(path), framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path}: cannot be read as safetensors ({error}); use an earlier checkpoint") from error
        return self._open[path]

    def close(self) -> None:
        """Closes the files."""
        self._open.clear()

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _from_rows(index: dict[str, Any]) -> dict[str, Any]:
    """Converts the tensors of an index of the older format to the present form."""
    tensors = {}
    for name, row in index["pieces"].items():
        region = [[row["start"], row["stop"]], *([0, size] for size in row["shape"][1:])] if row["shape"] else []
        pieces = [{"file": row["file"], "key": name, "region": region}]
        tensors[name] = {"dtype": row["dtype"], "shape": row["shape"], "pieces": pieces}
    return tensors
