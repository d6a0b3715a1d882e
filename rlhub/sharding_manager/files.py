"""Weights between separate jobs through a folder that both reach: no process group between them, and any number of readers.

Each rank of a trainer has a WeightWriter and writes its own parts of a version, every element of the model by one rank.  Each
rank of a rollout engine, in whatever job and layout, has a WeightReader and maps only the blocks that it needs.

    <folder>/version-<n>/rank-<r>-<i>.safetensors   blocks of weights, at most a bucket in a file
    <folder>/version-<n>/rank-<r>.json              for each block: file, key, name, full shape, region, dtype, checksum
    <folder>/version-<n>/manifest.json              the number of ranks that wrote

A version is written under another name and renamed when all ranks are done, so a reader sees a whole version or none.  Nothing
is flushed to the disk: after a power failure the trainer writes its weights again.

Reading has two halves, so that an engine which serves requests stops only for the second: `prepare` waits for the version,
maps its files and compares their checksums; `place` copies.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhub.engines.rollout.base import RolloutEngine, WeightBucket
from rlhub.engines.training.base import TrainEngine
from rlhub.errors import DeadlineError, EngineError, ReshardError, WeightMismatchError
from rlhub.protocol.weights.fingerprint import combine, digests, nonfinite_names
from rlhub.protocol.weights.pieces import (
    Piece,
    PieceInfo,
    Region,
    intersection,
    num_elements,
    relative,
    split,
    take,
    whole,
    whole_piece,
)
from rlhub.sharding_manager.layout_exchange import Member, decode_info, encode_info, exchange_members, this_node
from rlhub.sharding_manager.local_pieces import LocalPieces
from rlhub.sharding_manager.manager import update_by_stream
from rlhub.sharding_manager.peers import Peers
from rlhub.sharding_manager.plan import make_plan
from rlhub.sharding_manager.route import SyncReport, alone, check_range, raise_first
from rlhub.utils.atomic import TEMPORARY_SUFFIX

BLOCK_ELEMENTS = 1 << 20
"""The size of a block.  A block has one checksum, so a reader of a part of it reads all of it: little, against all that a rank
needs."""
KEPT_VERSIONS = 2  # a reader may still be reading the previous version
POLL_S = 0.05

OpenFiles = dict[Path, Any]
"""The mapped files, so that each is mapped once, however many of its blocks are read."""


@dataclass(slots=True, kw_only=True, frozen=True)
class _Block:
    """A block in a file.

    path: the file.
    key: the tensor's key in the file.
    checksum: the checksum of the block's bytes.
    """

    info: PieceInfo
    path: Path
    key: str
    checksum: int


@dataclass(slots=True, kw_only=True, frozen=True)
class _Part:
    """The part of a block that a live piece takes.

    region: its region in the full tensor.
    values: the mapped values, in the file's dtype.
    sent: the fingerprint of the values in the piece's dtype.
    """

    piece: PieceInfo
    region: Region
    values: Tensor
    sent: int


@dataclass(slots=True, kw_only=True, frozen=True)
class MappedVersion:
    """A version that a reader has found whole and undamaged.  It stays readable when the writer removes its files.

    parts: the parts for the live weights as they were described; None before the engine's first update, which reads `blocks`.
    """

    version: int
    blocks: dict[str, list[_Block]]
    parts: list[_Part] | None


class WeightWriter:
    """Writes a training engine's weights; all its ranks call `write` together.

    bucket_bytes: the extra memory, which is also the size of a file.
    """

    def __init__(self, train: TrainEngine, folder: Path, *, bucket_bytes: int, timeout_s: float = 1800.0) -> None:
        self._train, self._folder, self._bucket_bytes = train, folder, bucket_bytes
        self._peers = Peers.of_job(train.device, timeout_s)
        self._rank = self._peers.rank if self._peers else 0
        self._mine: list[PieceInfo] | None = None

    def write(self, version: int) -> SyncReport:
        """Writes the trainer's present weights into the folder as policy `version`.

        The report's fingerprint is that of the whole version on rank 0, and of this rank's blocks on other ranks.
        """
        start = time.perf_counter()
        self._train.onload()
        unfinished = self._folder / f"version-{version}{TEMPORARY_SUFFIX}"
        unfinished.mkdir(parents=True, exist_ok=True)
        rows = [row for number, pieces in enumerate(self._files()) for row in self._write_file(unfinished, number, pieces)]
        (unfinished / f"rank-{self._rank}.json").write_text(json.dumps({"blocks": rows}))
        self._train.offload()
        self._wait_for_all()
        blocks = [_block(unfinished, row) for row in rows]
        if self._rank == 0:
            blocks += self._publish(unfinished, version)
        self._wait_for_all()
        infos = [block.info for block in blocks[: len(rows)]]
        return SyncReport(
            seconds=time.perf_counter() - start,
            bytes=sum(info.num_bytes for info in infos),
            num_weights=len({info.name for info in infos}),
            version=version,
            fingerprint=combine((f"{block.info.name}{block.info.region}", block.checksum) for block in blocks),
        )

    def _publish(self, unfinished: Path, version: int) -> list[_Block]:
        """Renames the folder when all ranks have written; returns the blocks of the other ranks."""
        ranks = self._peers.size if self._peers else 1
        (unfinished / "manifest.json").write_text(json.dumps({"version": version, "ranks": ranks}))
        others = [block for rank in range(1, ranks) for block in _read_blocks(unfinished, rank)]
        final = _version_folder(self._folder, version)
        shutil.rmtree(final, ignore_errors=True)  # of a run that was resumed from before it
        unfinished.rename(final)
        versions = _versions(self._folder)
        kept = [number for number in versions if number <= version][-KEPT_VERSIONS:]
        for other in set(versions) - set(kept):
            shutil.rmtree(_version_folder(self._folder, other))
        return others

    def _wait_for_all(self) -> None:
        """Returns when every rank has called it."""
        if self._peers is not None:
            self._peers.minimum(0)

    def _files(self) -> Iterator[list[Piece]]:
        """Yields the blocks that this rank writes, one file's blocks at a time."""
        waiting: list[Piece] = []
        for piece in self._pieces():
            if waiting and sum(p.tensor.nbytes for p in waiting) + piece.tensor.nbytes > self._bucket_bytes:
                yield waiting
                waiting = []
            waiting.append(piece)
        if waiting:
            yield waiting

    def _pieces(self) -> Iterator[Piece]:
        local = self._train.local_weights()
        if local is None:  # weights that exist only as a stream: one rank writes, the others take part in gathering
            for bucket in self._train.named_weights(bucket_bytes=self._bucket_bytes):
                for name, tensor in bucket if self._rank == 0 else ():
                    for region in split(whole(tensor.shape), BLOCK_ELEMENTS):
                        yield Piece(
                            name=name, tensor=take(tensor, region).cpu().clone(), shape=tuple(tensor.shape), region=region
                        )
            return
        pieces = LocalPieces(local)
        if self._mine is None:
            self._mine = self._share(pieces)
        for info in self._mine:
            tensor = pieces.contiguous(info.name, info.region).cpu()
            yield Piece(name=info.name, tensor=tensor, shape=info.shape, region=info.region)

    def _share(self, pieces: LocalPieces) -> list[PieceInfo]:
        """Returns this rank's part of the model, in blocks.  A plan to one destination that needs everything assigns each
        element to one rank."""
        device, sources = self._train.device.type, pieces.infos()
        member = Member(side="sender", node=this_node(), device=device, sources=sources, destinations=[])
        members = exchange_members(self._peers, member)
        known = {info.name: info for member in members for info in member.sources}
        everything = [PieceInfo(name=i.name, shape=i.shape, region=whole(i.shape), dtype=i.dtype) for i in known.values()]
        ranks = range(len(members))
        plan = make_plan([m.sources for m in members], [everything], source_processes=ranks, destination_processes=[len(members)])
        return [
            PieceInfo(name=transfer.name, shape=known[transfer.name].shape, region=region, dtype=transfer.dtype)
            for transfer in plan.sends(self._rank)
            for region in split(transfer.region, BLOCK_ELEMENTS)
        ]

    def _write_file(self, unfinished: Path, number: int, pieces: list[Piece]) -> list[dict[str, Any]]:
        """Writes the pieces into one file and returns the rows that describe them."""
        name = f"rank-{self._rank}-{number}.safetensors"
        save_file({str(key): piece.tensor.contiguous() for key, piece in enumerate(pieces)}, unfinished / name)
        checksums = digests(piece.tensor.contiguous() for piece in pieces)
        return [
            {"file": name, "key": str(key), "piece": encode_info(piece.info), "checksum": checksum}
            for key, (piece, checksum) in enumerate(zip(pieces, checksums, strict=True))
        ]


class WeightReader:
    """Reads weights for one rank's rollout engine.  Ranks of a tensor-parallel group read independently: no call is
    collective."""

    def __init__(
        self, rollout: RolloutEngine, folder: Path, *, bucket_bytes: int, check: bool = True, timeout_s: float = 1800.0
    ) -> None:
        self._rollout, self._folder, self._bucket_bytes = rollout, folder, bucket_bytes
        self._check, self._timeout_s = check, timeout_s
        self._proven = False

    def newest(self) -> int | None:
        """Returns the latest whole version in the folder, or None."""
        return max(_versions(self._folder), default=None)

    def read(self, version: int) -> SyncReport:
        """Waits for `version` and loads it, with both halves at once, for an engine without requests."""
        start = time.perf_counter()
        self._rollout.wake_up(weights_only=True)
        report = self.place(self.prepare(version))
        report.seconds = time.perf_counter() - start
        return report

    def prepare(self, version: int) -> MappedVersion:
        """Waits for `version`, maps its files and compares their checksums, while the engine may generate.

        Raises DeadlineError if the version does not appear in time, EngineError if it has been removed, ReshardError if it
        belongs to another model, and WeightMismatchError for a block with a wrong checksum.  The engine keeps the weights that
        it has.
        """
        folder = self._await(version)
        with self._reading(version):
            blocks = _read_manifest(folder)
            parts = self._parts(blocks) if self._proven else None
        return MappedVersion(version=version, blocks=blocks, parts=parts)

    def place(self, mapped: MappedVersion) -> SyncReport:
        """Copies a version into the live weights and compares them with it.  The engine must not be in a step.

        The first version goes through the engine's own loader (see `update_by_stream`).  After an error (WeightMismatchError
        for a weight that did not arrive) the engine refuses to generate.  The report's fingerprint equals the writer's if both
        store the weights in the same dtype and this engine is not tensor-parallel.
        """
        start = time.perf_counter()
        self._rollout.wake_up(weights_only=True)
        parts = mapped.parts
        if parts is None:
            with self._reading(mapped.version):
                num_bytes = self._load(mapped.blocks, mapped.version)
                parts = self._parts(mapped.blocks)
        else:
            num_bytes = self._copy(parts, mapped.version)
        check_range(self._rollout)
        self._proven = True
        self._rollout.wake_up()
        return SyncReport(
            seconds=time.perf_counter() - start,
            bytes=num_bytes,
            num_weights=len(mapped.blocks),
            version=mapped.version,
            fingerprint=combine((f"{part.piece.name}{part.region}", part.sent) for part in parts) if self._check else "",
        )

    def _await(self, version: int) -> Path:
        folder, deadline = _version_folder(self._folder, version), time.monotonic() + self._timeout_s
        while not (folder / "manifest.json").exists():
            newest = self.newest()
            if newest is not None and newest > version:
                raise EngineError(f"version {version} of the weights is no longer in {self._folder}; the newest is {newest}")
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"version {version} of the weights in {self._folder}",
                    self._timeout_s,
                    "is the trainer running, and writing there?",
                )
            time.sleep(POLL_S)
        return folder

    @contextmanager
    def _reading(self, version: int) -> Iterator[None]:
        """Turns a missing file into an EngineError: the writer keeps few versions, so that of a slow reader may be removed."""
        try:
            yield
        except (FileNotFoundError, SafetensorError) as error:
            why = f"was removed or is damaged ({error}); the newest is {self.newest()}"
            raise EngineError(f"version {version} of the weights in {self._folder} {why}") from error

    def _load(self, blocks: dict[str, list[_Block]], version: int) -> int:
        """Loads full tensors through the engine's loader; returns the number of bytes."""
        return update_by_stream(self._rollout, self._buckets(blocks), version, check=self._check, agree=alone).bytes

    def _buckets(self, blocks: dict[str, list[_Block]]) -> Iterator[WeightBucket]:
        bucket: WeightBucket = []
        files: OpenFiles = {}
        for name, parts in blocks.items():
            full = torch.empty(parts[0].info.shape, dtype=parts[0].info.dtype)
            for part in _cut(whole_piece(name, full).info, parts, files):
                take(full, part.region).copy_(part.values)
            bucket.append((name, full))
            if sum(tensor.nbytes for _, tensor in bucket) >= self._bucket_bytes:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    def _parts(self, blocks: dict[str, list[_Block]]) -> list[_Part]:
        """Returns the parts of the blocks that make up the live weights."""
        pieces = list(self._rollout.live_weights())
        missing = [piece.name for piece in pieces if piece.name not in blocks]
        surplus = sorted(set(blocks) - {piece.name for piece in pieces})
        if missing or surplus:
            name = (missing + surplus)[0]
            raise ReshardError(f"the weights in {self._folder} and the rollout engine differ in {name}", weight=name)
        files: OpenFiles = {}
        return [part for piece in pieces for part in _cut(piece.info, blocks[piece.name], files)]

    @torch.no_grad()
    def _copy(self, parts: list[_Part], version: int) -> int:
        """Copies straight from the mapped files into the live weights; returns the number of bytes."""
        with self._rollout.overwriting(version):
            live = {(piece.name, piece.region): piece.tensor for piece in self._rollout.live_weights()}
            targets = [take(live[p.piece.name, p.piece.region], relative(p.region, p.piece.region)) for p in parts]
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part.values)
            if self._check:
                arrived = digests(target.cpu().contiguous() for target in targets)
                differing = [part.piece.name for part, value in zip(parts, arrived, strict=True) if part.sent != value]
                raise_first([part.piece.name for part in parts], differing, alone)
        return sum(target.nbytes for target in targets)


def _cut(piece: PieceInfo, blocks: list[_Block], files: OpenFiles) -> list[_Part]:
    """Returns the parts of the piece that the blocks have, mapped and checked.  files: the files that are mapped already."""
    if blocks[0].info.shape != piece.shape:
        raise ReshardError(
            f"{piece.name} has the full shape {blocks[0].info.shape} in the folder and {piece.shape} in the rollout engine: "
            "both must run the same model",
            weight=piece.name,
        )
    parts, covered = [], 0
    for block in blocks:
        common = intersection(block.info.region, piece.region)
        if common is None:
            continue
        covered += num_elements(common)
        values = take(_read_block(block, files), relative(common, block.info.region))
        as_written = common == block.info.region and values.dtype == piece.dtype
        sent = block.checksum if as_written else digests([values.to(piece.dtype).contiguous()])[0]
        parts.append(_Part(piece=piece, region=common, values=values, sent=sent))
    if covered != num_elements(piece.region):
        raise ReshardError(
            f"{num_elements(piece.region) - covered} elements of {piece.name} {piece.region} are in no file of "
            f"{blocks[0].path.parent}: the version is not whole",
            weight=piece.name,
        )
    return parts


def _read_block(block: _Block, files: OpenFiles) -> Tensor:
    """Maps a block and compares its checksum.  Checks too that it is finite, because NaN has the same checksum on both sides."""
    if block.path not in files:
        files[block.path] = safe_open(block.path, framework="pt")
    values: Tensor = files[block.path].get_tensor(block.key)
    if digests([values]) != [block.checksum]:
        raise WeightMismatchError(
            f"{block.path} has another checksum for {block.info.name} {block.info.region} than its manifest says: the file is "
            "damaged; write the version again",
            weight=block.info.name,
        )
    if nonfinite_names([(block.info.name, values)]):
        raise WeightMismatchError(
            f"{block.path} has {block.info.name} {block.info.region} with elements that are not finite: its writer has diverged; "
            "write an earlier checkpoint's weights",
            weight=block.info.name,
        )
    return values


def _read_manifest(folder: Path) -> dict[str, list[_Block]]:
    """Returns the blocks of all ranks by the name of their weight."""
    blocks: dict[str, list[_Block]] = {}
    for rank in range(int(json.loads((folder / "manifest.json").read_text())["ranks"])):
        for block in _read_blocks(folder, rank):
            blocks.setdefault(block.info.name, []).append(block)
    return blocks


def _read_blocks(folder: Path, rank: int) -> list[_Block]:
    """Returns the blocks that this rank wrote."""
    return [_block(folder, row) for row in json.loads((folder / f"rank-{rank}.json").read_text())["blocks"]]


def _block(folder: Path, row: Mapping[str, Any]) -> _Block:
    info = decode_info(row["piece"])
    return _Block(info=info, path=folder / row["file"], key=row["key"], checksum=int(row["checksum"]))


def _version_folder(folder: Path, version: int) -> Path:
    return folder / f"version-{version}"


def _versions(folder: Path) -> list[int]:
    """Returns the whole versions, oldest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = sorted(int(number) for name in names if (number := name.removeprefix("version-")) != name and number.isdigit())
    return [number for number in numbers if (_version_folder(folder, number) / "manifest.json").exists()]
