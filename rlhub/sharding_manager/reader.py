"""The reading half of publications: a version becomes the weights of one rank's rollout engine, in two halves.

An engine that serves requests stops for the second half only.  `prepare` waits for the version, reads and checks it while the
engine generates; where the engine has standby weights, it writes them there and compares what then is in them.  `place` exchanges
these with the live ones (on a GPU with captured graphs, copies them there), or, in an engine without, copies and compares.
An engine that stores weights quantized gets every version as its first one, whole weights through its loader, in `place`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from rlhub.engines.rollout.base import RolloutEngine, WeightBucket
from rlhub.errors import DeadlineError, EngineError, ReshardError
from rlhub.protocol.weights.fingerprint import WORD_TYPES, combine, digests
from rlhub.protocol.weights.pieces import (
    FP8,
    Piece,
    PieceInfo,
    Region,
    intersection,
    is_quantized,
    num_elements,
    relative,
    take,
    whole_piece,
)
from rlhub.sharding_manager.delta import DeltaError
from rlhub.sharding_manager.local_pieces import LocalPieces
from rlhub.sharding_manager.manager import update_by_stream
from rlhub.sharding_manager.route import SyncReport, alone, check_range, raise_first
from rlhub.sharding_manager.versions import (
    MANIFEST,
    Block,
    FolderVersion,
    ask_for_full,
    is_full,
    note_dtypes,
    version_folder,
    versions_in,
)

logger = logging.getLogger(__name__)
POLL_S = 0.05


@dataclass(slots=True, kw_only=True, frozen=True)
class _Part:
    """The part of a block that a live piece takes.

    region: its region in the full tensor.
    values: the values, in the version's dtype; None once they are in the standby weights.
    sent: the fingerprint of the values in the piece's dtype.
    """

    piece: PieceInfo
    region: Region
    values: Tensor | None
    sent: int


@dataclass(slots=True, kw_only=True, frozen=True, eq=False)
class MappedVersion:
    """A version that a reader has found whole and undamaged.  It stays readable when the writer removes its files.

    parts: the parts for the live weights as they were described; None before the engine's first update, which reads `found`.
    standby: the standby weights that have the version; None where `place` must copy.
    """

    version: int
    found: FolderVersion
    parts: list[_Part] | None
    standby: list[Piece] | None = None


class WeightReader:
    """Reads weights for one rank's rollout engine.  Ranks of a tensor-parallel group read independently: no call is
    collective."""

    def __init__(
        self, rollout: RolloutEngine, folder: Path, *, bucket_bytes: int, check: bool = True, timeout_s: float = 1800.0
    ) -> None:
        self._rollout, self._folder, self._bucket_bytes = rollout, folder, bucket_bytes
        self._check, self._timeout_s = check, timeout_s
        self._proven = False
        self._in_standby: MappedVersion | None = None
        self._fallbacks = 0

    def close(self) -> None:
        """Does nothing: a reader keeps no more than the engine."""

    def newest(self) -> int | None:
        """Returns the latest whole version in the folder, or None."""
        return max(versions_in(self._folder), default=None)

    def read(self, version: int) -> SyncReport:
        """Waits for `version` and loads it, with both halves at once, for an engine without requests."""
        start = time.perf_counter()
        self._rollout.wake_up(weights_only=True)
        report = self.place(self.prepare(version))
        report.seconds = time.perf_counter() - start
        return report

    def prepare(self, version: int) -> MappedVersion:
        """Waits for `version`, reads its files and compares their checksums, while the engine may generate.

        Where a delta cannot be used, waits for the writer to leave the version in full.  Raises DeadlineError if the version does
        not appear in time, EngineError if it has been removed, ReshardError if it belongs to another model, and
        WeightMismatchError for a block with a wrong checksum.  The engine keeps the weights that it has.
        """
        self._wait(version, lambda: (version_folder(self._folder, version) / MANIFEST).exists(), "writing there")
        with self._reading(version):
            try:
                return self._prepare(version)
            except DeltaError as error:
                self._fallbacks += 1
                logger.warning("version %d of the weights is read in full: %s", version, error)
                folder = version_folder(self._folder, version)
                ask_for_full(folder)
            self._wait(version, lambda: is_full(folder), "able to write the version in full")
            return self._prepare(version)

    def _prepare(self, version: int) -> MappedVersion:
        found = FolderVersion(self._folder, version)
        if not self._proven:
            found.decode()
            return MappedVersion(version=version, found=found, parts=None)
        standby, self._in_standby = self._rollout.standby_weights(), None
        if standby is None:
            return MappedVersion(version=version, found=found, parts=list(self._parts(found)))
        pieces = list(standby)
        mapped = MappedVersion(version=version, found=found, parts=self._fill(found, pieces), standby=pieces)
        found.close()  # now, because unmapping much memory takes a pause's time
        self._in_standby = mapped
        return mapped

    @torch.no_grad()
    def _fill(self, found: FolderVersion, standby: list[Piece]) -> list[_Part]:
        """Writes the version into the standby weights, and compares what is in them."""
        places = {(piece.name, piece.region): piece.tensor for piece in standby}
        parts, differing = [], []
        for part in self._parts(found):
            target = take(places[part.piece.name, part.piece.region], relative(part.region, part.piece.region))
            target.copy_(_read(part))
            if self._check and digests([target.cpu().contiguous()]) != [part.sent]:
                differing.append(part.piece.name)
            parts.append(replace(part, values=None))
        raise_first([part.piece.name for part in parts], differing, alone)
        check_range(standby)
        return parts

    def place(self, mapped: MappedVersion) -> SyncReport:
        """Gives the engine a version that is prepared.  The engine must not be in a step.

        The first version goes through the engine's own loader (see `update_by_stream`).  After an error (WeightMismatchError
        for a weight that did not arrive) the engine refuses to generate.  The report's fingerprint equals the writer's if both
        store the weights in the same dtype and this engine is not tensor-parallel.
        """
        start = time.perf_counter()
        self._rollout.wake_up(weights_only=True)
        parts = mapped.parts
        sent: list[tuple[str, int]] = []
        if mapped.standby is not None:
            num_bytes = self._exchange(mapped, mapped.standby)
        elif parts is not None:
            num_bytes = self._copy(parts, mapped.version)
        else:
            with self._reading(mapped.version):
                num_bytes = self._load(mapped.found)
                if self._proven:
                    parts = list(self._parts(mapped.found))
                else:  # the live weights are quantized, and what was sent are the blocks
                    blocks = [block for found in mapped.found.blocks.values() for block in found]
                    sent = [(f"{block.info.name}{block.info.region}", block.checksum) for block in blocks]
        sent += [(f"{part.piece.name}{part.region}", part.sent) for part in parts or ()]
        self._rollout.wake_up()
        return SyncReport(
            seconds=time.perf_counter() - start,
            bytes=num_bytes,
            num_weights=len(mapped.found.blocks),
            version=mapped.version,
            fingerprint=combine(sent) if self._check else "",
            fallbacks=self._fallbacks,
        )

    def _wait(self, version: int, is_there: Callable[[], bool], doing: str) -> None:
        """Waits for something in the folder that the writer of a version leaves there."""
        deadline = time.monotonic() + self._timeout_s
        while not is_there():
            newest = self.newest()
            if newest is not None and newest > version:
                raise EngineError(f"version {version} of the weights is no longer in {self._folder}; the newest is {newest}")
            if time.monotonic() > deadline:
                what = f"version {version} of the weights in {self._folder}"
                raise DeadlineError(what, self._timeout_s, f"is the trainer running, and {doing}?")
            time.sleep(POLL_S)

    @contextmanager
    def _reading(self, version: int) -> Iterator[None]:
        """Turns a missing file into an EngineError: the writer keeps few versions, so that of a slow reader may be removed."""
        try:
            yield
        except (FileNotFoundError, SafetensorError, DeltaError) as error:
            why = f"was removed or is damaged ({error}); the newest is {self.newest()}"
            raise EngineError(f"version {version} of the weights in {self._folder} {why}") from error

    def _load(self, found: FolderVersion) -> int:
        """Loads full tensors through the engine's loader; returns the number of bytes."""
        num_bytes = update_by_stream(self._rollout, self._buckets(found), found.version, check=self._check, agree=alone).bytes
        check_range(self._rollout.live_weights())
        self._proven = not is_quantized(self._rollout.live_weights())
        try:
            dtypes = {piece.name: piece.tensor.dtype for piece in self._rollout.live_weights()}
            note_dtypes(self._folder, {name: dtype for name, dtype in dtypes.items() if dtype != FP8})
        except OSError as error:
            logger.info("versions stay in the trainer's dtype: %s", error)
        return num_bytes

    def _buckets(self, found: FolderVersion) -> Iterator[WeightBucket]:
        bucket: WeightBucket = []
        for name, blocks in found.blocks.items():
            full = torch.empty(blocks[0].info.shape, dtype=blocks[0].info.dtype)
            for part in self._cut(whole_piece(name, full).info, found, LocalPieces(())):
                take(full, part.region).copy_(_read(part))
            bucket.append((name, full))
            if sum(tensor.nbytes for _, tensor in bucket) >= self._bucket_bytes:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    def _parts(self, found: FolderVersion) -> Iterator[_Part]:
        """Yields the parts of the blocks that make up the live weights."""
        pieces = [piece.info for piece in self._rollout.live_weights()]
        missing = [piece.name for piece in pieces if piece.name not in found.blocks]
        surplus = sorted(set(found.blocks) - {piece.name for piece in pieces})
        if missing or surplus:
            name = (missing + surplus)[0]
            raise ReshardError(f"the weights in {self._folder} and the rollout engine differ in {name}", weight=name)
        live = LocalPieces(self._rollout.live_weights() if self._proven else ())
        for piece in pieces:
            yield from self._cut(piece, found, live)

    def _cut(self, piece: PieceInfo, found: FolderVersion, live: LocalPieces) -> Iterator[_Part]:
        """Yields the parts of the piece that the blocks have, read and checked."""
        blocks, covered = found.blocks[piece.name], 0
        _refuse_other_model(piece, blocks[0])
        for block in blocks:
            common = intersection(block.info.region, piece.region)
            if common is None:
                continue
            covered += num_elements(common)
            values = take(found.values(block, lambda info: _live_block(live, info)), relative(common, block.info.region))
            as_written = common == block.info.region and values.dtype == piece.dtype
            sent = block.checksum if as_written else digests([values.to(piece.dtype).contiguous()])[0]
            yield _Part(piece=piece, region=common, values=values, sent=sent)
        if covered != num_elements(piece.region):
            raise ReshardError(
                f"{num_elements(piece.region) - covered} elements of {piece.name} {piece.region} are in no file of "
                f"{found.path}: the version is not whole",
                weight=piece.name,
            )

    def _exchange(self, mapped: MappedVersion, standby: list[Piece]) -> int:
        """Makes the standby weights the live ones; returns the number of bytes."""
        if mapped is not self._in_standby:
            raise EngineError(f"version {mapped.version} of the weights is not prepared any more: another has been since")
        self._in_standby = None
        with self._rollout.overwriting(mapped.version):
            self._rollout.exchange()
            live = {(piece.name, piece.region): piece.tensor for piece in self._rollout.live_weights()}
            differing = [p.name for p in standby if not _is_live(p.tensor, live.get((p.name, p.region)))]
            raise_first([piece.name for piece in standby], differing, alone)
        return sum(tensor.nbytes for tensor in live.values())

    @torch.no_grad()
    def _copy(self, parts: list[_Part], version: int) -> int:
        """Copies straight from the mapped files into the live weights; returns the number of bytes."""
        with self._rollout.overwriting(version):
            live = {(piece.name, piece.region): piece.tensor for piece in self._rollout.live_weights()}
            targets = [take(live[p.piece.name, p.piece.region], relative(p.region, p.piece.region)) for p in parts]
            for target, part in zip(targets, parts, strict=True):
                target.copy_(_read(part))
            if self._check:
                arrived = digests(target.cpu().contiguous() for target in targets)
                differing = [part.piece.name for part, value in zip(parts, arrived, strict=True) if part.sent != value]
                raise_first([part.piece.name for part in parts], differing, alone)
        check_range(self._rollout.live_weights())
        return sum(target.nbytes for target in targets)


def _is_live(standby: Tensor, live: Tensor | None) -> bool:
    """Returns whether the live weight is the standby weight's memory now, or has its bits."""
    if live is None or live.data_ptr() == standby.data_ptr():
        return live is not None
    words = WORD_TYPES[live.element_size()]
    return torch.equal(live.contiguous().view(words), standby.to(live.device).contiguous().view(words))


def _read(part: _Part) -> Tensor:
    assert part.values is not None, "read already"
    return part.values


def _live_block(live: LocalPieces, info: PieceInfo) -> Tensor | None:
    view = live.view(info.name, info.region)
    return None if view is None or view.dtype != info.dtype else view.cpu().contiguous()


def _refuse_other_model(piece: PieceInfo, block: Block) -> None:
    """Raises ReshardError for a block of another shape, or one that was cast to fewer bits than the piece has."""
    if block.info.shape != piece.shape:
        raise ReshardError(
            f"{piece.name} has the full shape {block.info.shape} in the folder and {piece.shape} in the rollout engine: "
            "both must run the same model",
            weight=piece.name,
        )
    if block.info.dtype not in (block.source, piece.dtype):
        raise ReshardError(
            f"{piece.name} was written in {block.info.dtype} for the engines that read so far, and is {piece.dtype} in this one: "
            "set actor_rollout_ref.rollout.dtype alike in all jobs that read these weights",
            weight=piece.name,
        )
