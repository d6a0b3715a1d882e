"""Rows of tokens in the files of collected trajectories, which the processes that compute on them read by themselves.

A row is packed as prompt length, response length and the set of its columns (int32 each, bit i for column i of `WIDE`), and the
values of these columns one after the other, little-endian.  The index of a file names the place of each row and its CRC-32, so a
process reads its own rows and no others, and finds a damaged one.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import fsspec
import numpy as np
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from rlhub.agents.remote.trajectory_store import PROMPTS, WIDE, RowRequest, check_columns, columns_of, joined_rows
from rlhub.agents.trajectory import Trajectory
from rlhub.errors import DataError
from rlhub.protocol import DataProto
from rlhub.utils.atomic import write_bytes

HEAD = struct.Struct("<iii")


@dataclass(slots=True, kw_only=True)
class Folder:
    """Reads and writes whole files below a URL.  read_bytes: the bytes that were read so far."""

    url: str
    read_bytes: int = field(init=False, default=0)
    _fs: Any = field(init=False)
    _root: str = field(init=False)

    def __post_init__(self) -> None:
        self._fs, self._root = fsspec.core.url_to_fs(self.url)
        self._fs.makedirs(self._root, exist_ok=True)

    @property
    def absolute(self) -> str:
        """Returns the URL that names the folder in other processes too, whatever their working directory."""
        return str(self._fs.unstrip_protocol(self._root))

    def write(self, name: str, data: bytes) -> None:
        """Writes a file atomically: by a rename on disks, and on object stores because they show only complete files."""
        if isinstance(self._fs, LocalFileSystem):
            write_bytes(Path(self._root) / name, data)
        else:
            self._fs.pipe_file(f"{self._root}/{name}", data)

    def read(self, name: str) -> bytes:
        """Returns the content of a file."""
        data = bytes(self._fs.cat_file(f"{self._root}/{name}"))
        self.read_bytes += len(data)
        return data

    def read_spans(self, name: str, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns the bytes [start, stop) of a file, of each span.  Raises OSError."""
        path, starts, stops = f"{self._root}/{name}", [start for start, _ in spans], [stop for _, stop in spans]
        found: list[bytes] = self._fs.cat_ranges([path] * len(spans), starts, stops, on_error="raise")
        return found

    def names(self) -> list[str]:
        """Returns the names of all files, as they are now."""
        self._fs.invalidate_cache(self._root)
        return [str(path).rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]


class RowPlace(NamedTuple):
    """The place of a row in its file, bytes [start, stop), and the CRC-32 of these."""

    start: int
    stop: int
    checksum: int

    @property
    def key(self) -> str:
        """Returns the text by which a TrajectoryRef names the place."""
        return f"{self.start}-{self.stop}-{self.checksum:08x}"

    @classmethod
    def of(cls, key: str) -> Self:
        """Returns the place of a key."""
        start, stop, checksum = key.split("-")
        return cls(int(start), int(stop), int(checksum, 16))


def pack(trajectory: Trajectory) -> bytes:
    """Returns the row of a trajectory as bytes."""
    columns = columns_of(trajectory)
    present = sum(1 << number for number, name in enumerate(WIDE) if name in columns)
    head = HEAD.pack(trajectory.prompt_length, trajectory.response_length, present)
    return head + b"".join(columns[name].numpy().tobytes() for name in WIDE if name in columns)


def unpack(data: bytes) -> dict[str, Tensor]:
    """Returns the columns of a row, each (length,)."""
    prompt, response, present = HEAD.unpack_from(data)
    columns, start = {}, HEAD.size
    for number, (name, dtype) in enumerate(WIDE.items()):
        if present >> number & 1:
            stop = start + (prompt if name == PROMPTS else response) * dtype.itemsize
            kind = torch.empty(0, dtype=dtype).numpy().dtype
            columns[name] = torch.from_numpy(np.frombuffer(data[start:stop], dtype=kind).copy())
            start = stop
    return columns


@dataclass(slots=True, frozen=True)
class CollectedRows:
    """Is the RowSource of rows in a file of collected trajectories: whoever gets it reads them there.

    url: the folder's.  name: the file's.  request: the rows by the keys of their places.  vocab_size: token ids from it on are
    refused.
    """

    url: str
    name: str
    request: RowRequest
    vocab_size: int

    def begin(self) -> Callable[[], DataProto]:
        return self.read

    def read(self) -> DataProto:
        """Reads the rows.  Raises DataError for a file that is damaged or cannot be read here, WorkflowError for tokens outside
        of the vocabulary."""
        places = [RowPlace.of(key) for key in self.request.keys]
        try:
            rows = [unpack(data) for data in self._bytes(places)]
        except OSError as error:
            raise DataError(
                f"{self.url}/{self.name}: {error}; every machine that trains reads the tokens there, so name a folder that all "
                "of them reach by the same path or URL"
            ) from error
        for place, columns in zip(places, rows, strict=True):
            check_columns(f"{self.name}, bytes {place.start} to {place.stop}", columns, self.vocab_size)
        return joined_rows(rows, self.request)

    def _bytes(self, places: Sequence[RowPlace]) -> Iterator[bytes]:
        """Yields the bytes of each row; rows side by side are read as one span."""
        spans: list[tuple[int, int]] = []
        for place in places:
            if spans and spans[-1][1] == place.start:
                spans[-1] = spans[-1][0], place.stop
            else:
                spans.append((place.start, place.stop))
        whole = b"".join(Folder(url=self.url).read_spans(self.name, spans))
        start = 0
        for place in places:
            data, start = whole[start : start + place.stop - place.start], start + place.stop - place.start
            if zlib.crc32(data) != place.checksum:
                raise DataError(
                    f"{self.url}/{self.name}: bytes {place.start} to {place.stop} are not those that were written: the file was "
                    "damaged; remove this number's files of the writer, or collect anew"
                )
            yield data
