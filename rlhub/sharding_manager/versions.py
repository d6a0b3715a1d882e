"""Versions of weights in a folder: their files, and the blocks of one version as a reader gets them.

    <folder>/version-<n>/rank-<r>-<i>.safetensors   blocks of weights, at most a bucket in a file
    <folder>/version-<n>/rank-<r>.json              for each block: file, key, name, full shape, region, dtype, checksum
    <folder>/version-<n>/manifest.json              the number of ranks that wrote, the version on which the deltas build (base),
                                                    and the full version with which the chain of deltas begins (full)
    <folder>/version-<n>/full-rank-<r>...           the same blocks without deltas, written because a reader asked (full-wanted)
    <folder>/dtypes-<hash>.json                     dtypes of the weights in an engine that reads here

A block is stored in full or as a delta (see `delta`) on the block of the version before, which a reader knows by its checksum: it
takes its own live weights where they are that block, and otherwise follows the chain through the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlhub.errors import WeightMismatchError
from rlhub.protocol.weights.fingerprint import digests, nonfinite_names
from rlhub.protocol.weights.pieces import PieceInfo
from rlhub.sharding_manager.delta import DeltaError, decode
from rlhub.sharding_manager.layout_exchange import DTYPES, decode_info, encode_info
from rlhub.utils.atomic import write_text

MANIFEST, WANTED, FULL = "manifest.json", "full-wanted", "full-"

LiveBlock = Callable[[PieceInfo], Tensor | None]
"""Returns the live weights of the region in the dtype given, on CPU and contiguous, or None where the engine has no such part."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Block:
    """A block in a file.

    path: the file.  key: the tensor's key in the file.  checksum: that of the block's bytes.  source: the trainer's dtype, from
    which the block may have been cast.  base: for a delta, the checksum of the block on which it builds.  stored: the checksum of
    the bytes in the file.
    """

    info: PieceInfo
    path: Path
    key: str
    checksum: int
    source: torch.dtype
    base: int | None
    stored: int

    def row(self) -> dict[str, Any]:
        """Returns the block's row in a rank's list."""
        row = {"file": self.path.name, "key": self.key, "piece": encode_info(self.info), "checksum": self.checksum}
        return row | {"source": str(self.source).removeprefix("torch."), "base": self.base, "stored": self.stored}


def block_of(folder: Path, row: Mapping[str, Any]) -> Block:
    """Returns the block that a row of a rank's list describes."""
    info, checksum, base = decode_info(row["piece"]), int(row["checksum"]), row.get("base")
    return Block(
        info=info,
        path=folder / row["file"],
        key=row["key"],
        checksum=checksum,
        source=DTYPES[row["source"]] if "source" in row else info.dtype,
        base=None if base is None else int(base),
        stored=int(row.get("stored", checksum)),
    )


def read_blocks(folder: Path, rank: int, *, prefix: str = "") -> list[Block]:
    """Returns the blocks that this rank wrote."""
    return [block_of(folder, row) for row in json.loads((folder / f"{prefix}rank-{rank}.json").read_text())["blocks"]]


def version_folder(folder: Path, version: int) -> Path:
    """Returns the folder of a version."""
    return folder / f"version-{version}"


def versions_in(folder: Path) -> list[int]:
    """Returns the whole versions, oldest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = sorted(int(number) for name in names if (number := name.removeprefix("version-")) != name and number.isdigit())
    return [number for number in numbers if (version_folder(folder, number) / MANIFEST).exists()]


def chain_start(folder: Path, version: int) -> int:
    """Returns the full version with which the chain of deltas begins that leads to this version: itself, if it is full."""
    return int(json.loads((version_folder(folder, version) / MANIFEST).read_text()).get("full", version))


def is_full(path: Path) -> bool:
    """Returns whether the version in this folder has every block in full, as it was written or because a reader asked."""
    manifest = json.loads((path / MANIFEST).read_text())
    answered = all((path / f"{FULL}rank-{rank}.json").exists() for rank in range(int(manifest["ranks"])))
    return answered or manifest.get("full", manifest["version"]) == manifest["version"]


def ask_for_full(path: Path) -> None:
    """Asks the writer for every block of the version in this folder in full.  Raises OSError where the version is gone."""
    (path / WANTED).touch()


class FolderVersion:
    """The blocks of one version.  Reading them needs the files of the older versions in its chain too.

    blocks: by the name of their weight.  full: whether every block is there in full.  Raises FileNotFoundError for a version that
    is gone.
    """

    def __init__(self, folder: Path, version: int) -> None:
        self.path, self.version, self._folder = version_folder(folder, version), version, folder
        manifest = json.loads((self.path / MANIFEST).read_text())
        self._ranks, self._base = int(manifest["ranks"]), manifest.get("base")
        self._complete = manifest.get("full", version) == version  # as it was written
        self.full = is_full(self.path)
        self._files: dict[Path, Any] = {}
        self._older: FolderVersion | None = None
        self._decoded: dict[tuple[str, Any], Tensor] = {}
        self.blocks: dict[str, list[Block]] = {}
        for block in self._read():
            self.blocks.setdefault(block.info.name, []).append(block)

    def _read(self) -> Iterator[Block]:
        prefix = FULL if self.full and not self._complete else ""
        for rank in range(self._ranks):
            try:
                yield from read_blocks(self.path, rank, prefix=prefix)
            except (OSError, ValueError, KeyError) as error:
                if self.full:
                    raise
                raise DeltaError(f"the list of rank {rank} in {self.path} was removed or is damaged ({error})") from error

    def decode(self) -> None:
        """Decodes all deltas into memory, for an engine whose own weights cannot serve."""
        for block in (block for blocks in self.blocks.values() for block in blocks if block.base is not None):
            self._decoded[block.info.name, block.info.region] = self.values(block)

    def close(self) -> None:
        """Unmaps the files and forgets what was decoded; the descriptions of the blocks stay."""
        self._files, self._older, self._decoded = {}, None, {}

    def values(self, block: Block, live: LiveBlock | None = None) -> Tensor:
        """Returns the values of a block, compared with its checksum; mapped from the file where they are stored in full.

        Raises DeltaError for a delta that cannot be used, and WeightMismatchError for a damaged file, or elements that are not
        finite: NaN has the same checksum on both sides.
        """
        key = (block.info.name, block.info.region)
        if key in self._decoded:
            return self._decoded[key]
        values = self._stored(block) if self.full else self._replaceable(block, live)
        if nonfinite_names([(block.info.name, values)]):
            raise WeightMismatchError(
                f"{block.path} has {block.info.name} {block.info.region} with elements that are not finite: its writer has "
                "diverged; write an earlier checkpoint's weights",
                weight=block.info.name,
            )
        return values

    def _stored(self, block: Block) -> Tensor:
        """Maps the bytes of a block and compares their checksum."""
        if block.path not in self._files:
            self._files[block.path] = safe_open(block.path, framework="pt")
        stored: Tensor = self._files[block.path].get_tensor(block.key)
        if digests([stored]) != [block.stored]:
            raise WeightMismatchError(
                f"{block.path} has another checksum for {block.info.name} {block.info.region} than its manifest says: the "
                "file is damaged; write the version again",
                weight=block.info.name,
            )
        return stored

    def _replaceable(self, block: Block, live: LiveBlock | None) -> Tensor:
        """Returns the values of a block in a version of which the writer can still write all blocks in full."""
        try:
            stored = self._stored(block)
            return stored if block.base is None else self._decode(block, stored, live)
        except (OSError, SafetensorError, WeightMismatchError) as error:
            raise DeltaError(f"{block.path}: {error}") from error

    def _decode(self, block: Block, stored: Tensor, live: LiveBlock | None) -> Tensor:
        base = live(block.info) if live is not None else None
        if base is None or digests([base]) != [block.base]:
            base = self._in_chain(block)
        values = decode(base, stored)
        if digests([values]) != [block.checksum]:
            raise DeltaError(f"{block.path} gives {block.info.name} {block.info.region} another checksum than its list says")
        return values

    def _in_chain(self, block: Block) -> Tensor:
        """Returns the base of a delta, from the files of the version before."""
        if self._base is None:
            raise DeltaError(f"{self.path} has deltas and names no version on which they build")
        if self._older is None:
            self._older = FolderVersion(self._folder, int(self._base))
        for found in self._older.blocks.get(block.info.name, ()):
            if found.info == block.info and found.checksum == block.base:
                return self._older.values(found)
        raise DeltaError(f"{block.path} builds on {block.info.name} {block.info.region} as {self._older.path} does not have it")


# The dtypes of the engines that read


def note_dtypes(folder: Path, dtypes: Mapping[str, torch.dtype]) -> None:
    """Tells the writer in which dtypes an engine stores its weights, by Hugging Face names."""
    text = json.dumps({name: str(dtype).removeprefix("torch.") for name, dtype in sorted(dtypes.items())})
    path = folder / f"dtypes-{xxhash.xxh3_64_hexdigest(text.encode())}.json"
    if not path.exists():  # engines of one kind share a file
        write_text(path, text)


def noted_dtypes(folder: Path) -> dict[str, torch.dtype]:
    """Returns the dtypes that all engines which read here agree on."""
    found: dict[str, set[str]] = {}
    for path in folder.glob("dtypes-*.json"):
        for name, dtype in json.loads(path.read_text()).items():
            found.setdefault(name, set()).add(dtype)
    return {name: DTYPES[dtypes.pop()] for name, dtypes in found.items() if len(dtypes) == 1 and dtypes <= DTYPES.keys()}
