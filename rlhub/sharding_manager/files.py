"""Weights between separate jobs through a folder that both reach: no process group between them, and any number of readers.

Each rank of a trainer has a WeightWriter and writes its own parts of a version, every element of the model by one rank.  Each
rank of a rollout engine, in whatever job and layout, has a WeightReader and maps only the blocks that it needs.  See `versions`
for the files.

A version is written under another name and renamed when all ranks are done, so a reader sees a whole version or none.  Nothing
is flushed to the disk: after a power failure the trainer writes its weights again.  Blocks are in the dtype of the engines that
read, once these have said which it is, and with `full_every` above 1 most versions have only what changed.

A folder may be in a machine's memory.  Memory is not freed when a process is killed, so such a folder has a lock that ends with
the process that holds it, and the next one to be opened removes the folders whose lock is free.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rlhub.engines.training.base import TrainEngine
from rlhub.protocol.weights.fingerprint import combine, digests
from rlhub.protocol.weights.pieces import Piece, PieceInfo, Region, split, take, whole
from rlhub.sharding_manager.delta import encode
from rlhub.sharding_manager.layout_exchange import Member, exchange_members, this_node
from rlhub.sharding_manager.local_pieces import LocalPieces
from rlhub.sharding_manager.peers import Peers
from rlhub.sharding_manager.plan import make_plan
from rlhub.sharding_manager.route import SyncReport
from rlhub.sharding_manager.versions import (
    FULL,
    MANIFEST,
    WANTED,
    Block,
    chain_start,
    noted_dtypes,
    version_folder,
    versions_in,
)
from rlhub.utils import faults
from rlhub.utils.atomic import TEMPORARY_SUFFIX

logger = logging.getLogger(__name__)
BLOCK_ELEMENTS = 1 << 20
"""The size of a block.  A block has one checksum, so a reader of a part of it reads all of it: little, against all that a rank
needs."""
SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rlhub-weights-"
KEPT_VERSIONS = 2  # a reader may still be reading the previous version
ANSWER_POLL_S = 0.2  # a reader that lacks a full version waits so long before it is written

Snapshot = dict[tuple[str, Region], tuple[Piece, int]]
"""The blocks of a version in this process's memory, each with its checksum."""


class WeightWriter:
    """Writes a training engine's weights; all its ranks call `write` together.

    bucket_bytes: the extra memory, which is also the size of a file.
    full_every: a full version, then so many less one with deltas; 1 writes full versions only.  More keeps this rank's part of
        the last version in memory, from which a thread writes it in full where a reader cannot use a delta.
    own_folder: the folder has this rank's files only; else all ranks write into one.
    """

    def __init__(
        self,
        train: TrainEngine,
        folder: Path,
        *,
        bucket_bytes: int,
        timeout_s: float = 1800.0,
        full_every: int = 1,
        own_folder: bool = False,
    ) -> None:
        self._train, self._folder, self._bucket_bytes, self._full_every = train, folder, bucket_bytes, full_every
        self._own_folder = own_folder
        self._peers = Peers.of_job(train.device, timeout_s)
        self._rank = self._peers.rank if self._peers else 0
        self._mine: list[PieceInfo] | None = None
        self._dtypes: dict[str, torch.dtype] = {}  # of the engines that read
        self._sources: dict[str, torch.dtype] = {}  # of the trainer
        self._snapshot: Snapshot = {}
        self._version = self._full_version = -1  # of the snapshot, and of the full version before it
        self._num_deltas = 0
        self._turn = threading.Lock()  # for the snapshot
        self._closed = threading.Event()
        self._answering: threading.Thread | None = None

    def write(self, version: int) -> SyncReport:
        """Writes the trainer's present weights into the folder as policy `version`.

        The report's fingerprint is that of the whole version; its other figures are those of this rank's part, and wire_bytes
        those that it wrote.
        """
        with self._turn:
            return self._write(version)

    def close(self) -> None:
        """Ends the thread that writes full versions for readers.  Idempotent."""
        self._closed.set()
        if self._answering is not None:
            self._answering.join()

    def _write(self, version: int) -> SyncReport:
        start = time.perf_counter()
        self._train.onload()
        unfinished = self._folder / f"version-{version}{TEMPORARY_SUFFIX}"
        unfinished.mkdir(parents=True, exist_ok=True)
        base = self._begin(version)
        blocks, num_bytes = self._write_blocks(unfinished, self._pieces(), deltas=base is not None)
        self._train.offload()
        checksums = self._of_all_ranks([(f"{block.info.name}{block.info.region}", block.checksum) for block in blocks])
        if self._rank == 0 or self._own_folder:
            self._publish(unfinished, version, base)
        self._of_all_ranks([])
        self._version = version
        return SyncReport(
            seconds=time.perf_counter() - start,
            bytes=sum(block.info.num_bytes for block in blocks),
            num_weights=len({block.info.name for block in blocks}),
            version=version,
            fingerprint=combine(checksums),
            wire_bytes=num_bytes,
        )

    def _begin(self, version: int) -> int | None:
        """Returns the version on which the deltas of this one build, or None for a full version."""
        base, self._version = self._version, -1  # a snapshot of a version that was not finished serves for nothing
        self._dtypes = noted_dtypes(self._folder)
        if base < 0 or version <= base or self._num_deltas + 1 >= self._full_every:
            self._full_version, self._num_deltas = version, 0
            return None
        self._num_deltas += 1
        if self._answering is None:
            self._answering = threading.Thread(target=self._answer, name="full-versions", daemon=True)
            self._answering.start()
        return base

    def _publish(self, unfinished: Path, version: int, base: int | None) -> None:
        """Renames the folder when all ranks have written."""
        ranks = self._peers.size if self._peers else 1
        manifest = {"version": version, "ranks": ranks, "base": base, "full": self._full_version}
        (unfinished / MANIFEST).write_text(json.dumps(manifest))
        final = version_folder(self._folder, version)
        shutil.rmtree(final, ignore_errors=True)  # of a run that was resumed from before it
        unfinished.rename(final)
        faults.at("weights.written", path=final)
        self._remove_others(version)

    def _remove_others(self, version: int) -> None:
        """Removes the versions that no reader of the newest two needs, and those of a run that was resumed from before them."""
        versions = versions_in(self._folder)
        kept = [number for number in versions if number <= version][-KEPT_VERSIONS:]
        oldest = min(chain_start(self._folder, number) for number in kept)
        for other in versions:
            if not oldest <= other <= version:
                shutil.rmtree(version_folder(self._folder, other))

    def _of_all_ranks(self, checksums: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Returns the named checksums of all ranks, once every rank has called it."""
        if self._peers is None:
            return checksums
        found = self._peers.all_gather_bytes(json.dumps(checksums).encode())
        return [(name, value) for part in found for name, value in json.loads(part)]

    # -- blocks ------------------------------------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[Piece]:
        """Yields the blocks that this rank writes, on CPU, contiguous and in the readers' dtype; some are live weights."""
        local = self._train.local_weights()
        if local is None:  # weights that exist only as a stream: one rank writes, the others take part in gathering
            for bucket in self._train.published_weights(bucket_bytes=self._bucket_bytes):
                for name, tensor in bucket if self._rank == 0 else ():
                    for region in split(whole(tensor.shape), BLOCK_ELEMENTS):
                        part = self._cast(name, take(tensor, region)).cpu().clone(memory_format=torch.contiguous_format)
                        yield Piece(name=name, tensor=part, shape=tuple(tensor.shape), region=region)
            return
        pieces = LocalPieces(local)
        if self._mine is None:
            self._mine = self._share(pieces)
        for info in self._mine:
            tensor = self._cast(info.name, pieces.contiguous(info.name, info.region)).cpu()
            yield Piece(name=info.name, tensor=tensor, shape=info.shape, region=info.region)

    def _cast(self, name: str, tensor: Tensor) -> Tensor:
        """Casts to the dtype of the engines that read, if that has fewer bytes."""
        self._sources[name] = tensor.dtype
        dtype = self._dtypes.get(name, tensor.dtype)
        return tensor.to(dtype) if dtype.itemsize < tensor.dtype.itemsize else tensor

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

    def _write_blocks(self, folder: Path, pieces: Iterable[Piece], *, deltas: bool, prefix: str = "") -> tuple[list[Block], int]:
        """Writes the pieces into files of at most a bucket each, and then their list; returns the blocks and the bytes stored."""
        blocks, num_bytes = [], 0
        for number, bucket in enumerate(_buckets(pieces, self._bucket_bytes)):
            path = folder / f"{prefix}rank-{self._rank}-{number}.safetensors"
            stored = [self._stored(piece, str(key), path, deltas) for key, piece in enumerate(bucket)]
            save_file({block.key: tensor for block, tensor in stored}, path)
            blocks += [block for block, _ in stored]
            num_bytes += sum(tensor.nbytes for _, tensor in stored)
        rows = json.dumps({"blocks": [block.row() for block in blocks]})
        part = folder / f"{prefix}rank-{self._rank}.json{TEMPORARY_SUFFIX}"
        part.write_text(rows)
        part.rename(part.with_suffix(""))
        return blocks, num_bytes

    def _stored(self, piece: Piece, key: str, path: Path, deltas: bool) -> tuple[Block, Tensor]:
        """Returns the block and what is stored of it, and keeps its values for the next version's delta."""
        place = (piece.name, piece.region)
        (checksum,) = digests([piece.tensor])
        before = self._snapshot.get(place)
        if before is not None and before[0].info != piece.info:
            before = None
        delta = encode(before[0].tensor, piece.tensor) if deltas and before else None
        if self._full_every > 1 and not (before and before[1] == checksum):
            kept = Piece(name=piece.name, tensor=piece.tensor.clone(), shape=piece.shape, region=piece.region)
            self._snapshot[place] = (kept, checksum)
        block = Block(
            info=piece.info,
            path=path,
            key=key,
            checksum=checksum,
            source=self._sources[piece.name],
            base=None if delta is None or before is None else before[1],
            stored=checksum if delta is None else digests([delta])[0],
        )
        return block, piece.tensor if delta is None else delta

    # -- full versions for readers that cannot use a delta -----------------------------------------------------------------

    def _answer(self) -> None:
        """Runs in a thread: writes the last version in full where a reader asks for it."""
        while not self._closed.wait(ANSWER_POLL_S):
            with self._turn:
                folder = version_folder(self._folder, self._version)
                done = folder / f"{FULL}rank-{self._rank}.json"
                if self._version < 0 or not (folder / WANTED).exists() or done.exists():
                    continue
                try:
                    pieces = [piece for piece, _ in self._snapshot.values()]
                    self._write_blocks(folder, pieces, deltas=False, prefix=FULL)
                except OSError as error:
                    logger.warning("%s cannot be written in full: %s", folder, error)
                else:
                    logger.warning("%s is now there in full: a reader could not use its deltas", folder)


def _buckets(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    waiting: list[Piece] = []
    for piece in pieces:
        if waiting and sum(p.tensor.nbytes for p in waiting) + piece.tensor.nbytes > limit:
            yield waiting
            waiting = []
        waiting.append(piece)
    if waiting:
        yield waiting


# Folders in memory


class WeightsFolder:
    """The folder in which versions are written.  `close` removes what this process created.

    in_memory: it is in this machine's memory, where deltas would save nothing.
    """

    def __init__(self, path: Path, lock: int | None = None, *, temporary: bool) -> None:
        self.path, self.in_memory = path, lock is not None
        self._lock, self._temporary = lock, temporary
        path.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """Removes a temporary folder and its lock.  Idempotent."""
        if self._temporary:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            _lock_file(self.path).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def remove_abandoned(memory: Path = SHARED_MEMORY) -> None:
    """Removes the folders of processes that have ended."""
    for lock_file in memory.glob(f"{PREFIX}*.lock"):
        try:
            descriptor = os.open(lock_file, os.O_RDWR)
        except OSError:  # another user's, or gone just now
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
            lock_file.unlink(missing_ok=True)
        except BlockingIOError:
            continue
        finally:
            os.close(descriptor)


def new_in_memory(memory: Path = SHARED_MEMORY) -> WeightsFolder:
    """Returns a new folder, and removes those that others have left.  Raises OSError where the memory cannot be used."""
    remove_abandoned(memory)
    path = memory / f"{PREFIX}{uuid.uuid4().hex[:12]}"
    new = path.with_name(path.name + ".new")  # no process finds the file before it is locked
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(_lock_file(path))
    return WeightsFolder(path, lock, temporary=True)


def _lock_file(path: Path) -> Path:
    return path.with_name(path.name + ".lock")
