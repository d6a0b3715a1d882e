"""Routes of two ranks in two threads, over a process group of their own: what arrives, and what needs a buffer on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import product
from threading import Event

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.errors import DeadlineError, WeightMismatchError
from rlhub.protocol.weights.pieces import Piece, take
from rlhub.sharding_manager import schedule
from rlhub.sharding_manager.layout_exchange import Member, exchange_members
from rlhub.sharding_manager.local_pieces import LocalPieces
from rlhub.sharding_manager.peers import Peers
from rlhub.sharding_manager.route import Route, SyncReport, make_route
from rlhub.sharding_manager.transport import Transport

RANKS = 2
TIMEOUT_S = 60.0
DTYPES = (torch.float32, torch.bfloat16)
NAMES = {"table": (96, 40), "small": (6, 3), "bias": (40,), "scale": ()}
WEIGHTS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(number))
    for number, (name, shape) in enumerate(NAMES.items())
}


def rows(rank: int, tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Returns the rank's half of the first dimension; the last rank has a scalar."""
    half = tensor.shape[0] // RANKS if tensor.shape else 0
    return tuple([(rank * half, (rank + 1) * half)] + [(0, size) for size in tensor.shape[1:]]) if tensor.shape else ()


def columns(rank: int, tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """Returns the rank's half of the last dimension of matrices, all of the others."""
    if tensor.dim() < 2:
        return tuple((0, size) for size in tensor.shape)
    cut = tensor.shape[-1] // RANKS
    return (*((0, size) for size in tensor.shape[:-1]), (0, cut) if rank == 0 else (cut, tensor.shape[-1]))


def everything(rank: int, tensor: Tensor) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in tensor.shape)


Cut = Callable[[int, Tensor], tuple[tuple[int, int], ...]]


def pieces(rank: int, cut: Cut, dtype: torch.dtype, *, fill: bool, transposed: bool = False) -> list[Piece]:
    """Returns a rank's pieces, with the weights' values or with NaN.  transposed: matrices lie in memory by columns."""
    made = []
    for name, full in WEIGHTS.items():
        if not full.shape and cut is rows and rank == 0:
            continue
        region = cut(rank, full)
        tensor = take(full, region).to(dtype).clone()
        if transposed and tensor.dim() == 2:
            tensor = tensor.t().contiguous().t()
        if not fill:
            tensor.fill_(torch.nan)
        made.append(Piece(name=name, tensor=tensor, shape=tuple(full.shape), region=region))
    return made


def together(action: Callable[[Peers], object]) -> list[object]:
    """Returns the results or the errors of both ranks, by rank."""
    store = dist.HashStore()

    def run(rank: int) -> object:
        group = dist.ProcessGroupGloo(store, rank, RANKS, timedelta(seconds=TIMEOUT_S))
        labels = ["rank"] * RANKS
        peers = Peers(group, rank=rank, size=RANKS, device=torch.device("cpu"), timeout_s=TIMEOUT_S, labels=labels)
        try:
            return action(peers)
        except Exception as error:  # noqa: BLE001  a thread's boundary: the test looks at it
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(run, range(RANKS)))


def route_of(peers: Peers, source: Sequence[Piece], destination: Sequence[Piece], memory_bytes: int = 1 << 16) -> Route:
    infos = [[piece.info for piece in side] for side in (source, destination)]
    member = Member(side="both", node="here", device="cpu", sources=infos[0], destinations=infos[1])
    return make_route(peers, exchange_members(peers, member), memory_bytes=memory_bytes, check=True)


@pytest.mark.parametrize("part_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize(("before", "after"), [(rows, everything), (rows, columns), (columns, rows)])
def test_every_part_arrives_whatever_its_way(monkeypatch: pytest.MonkeyPatch, before: Cut, after: Cut, part_bytes: int) -> None:
    monkeypatch.setattr(schedule, "PART_BYTES", part_bytes)

    def sync(peers: Peers) -> int:
        source, count = pieces(peers.rank, before, torch.float32, fill=True), 0
        for dtype, transposed, memory_bytes in product(DTYPES, (False, True), (1 << 9, 1 << 16)):
            live = pieces(peers.rank, after, dtype, fill=False, transposed=transposed)
            route = route_of(peers, source, live, memory_bytes)
            first = route.run(source, live, 0)
            for piece in live:
                assert torch.equal(piece.tensor, take(WEIGHTS[piece.name], piece.region).to(dtype)), piece.name
                piece.tensor.fill_(torch.nan)
            second = route.run(source, live, 1)
            assert (first.version, second.version, first.fingerprint) == (0, 1, second.fingerprint)
            assert all(torch.equal(piece.tensor, take(WEIGHTS[piece.name], piece.region).to(dtype)) for piece in live)
            count += 1
        return count

    assert together(sync) == [8, 8]


def buffers_of(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> int:
    """Returns the bytes of all buffers of an update from rows to everything."""
    sizes: list[int] = []
    original = Transport._buffers

    def noted(self: Transport, rounds: object) -> list[Tensor]:
        buffers = original(self, rounds)  # type: ignore[arg-type]
        sizes.extend(len(buffer) for buffer in buffers)
        return buffers

    monkeypatch.setattr(Transport, "_buffers", noted)
    monkeypatch.setattr(schedule, "PART_BYTES", 1)

    def sync(peers: Peers) -> object:
        source = pieces(peers.rank, rows, torch.float32, fill=True)
        live = pieces(peers.rank, everything, dtype, fill=False)
        return route_of(peers, source, live).run(source, live, 0)

    assert all(isinstance(report, SyncReport) for report in together(sync))
    return sum(sizes)


def test_what_is_contiguous_at_both_ends_needs_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert buffers_of(monkeypatch, torch.float32) == 0


def test_what_is_cast_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert buffers_of(monkeypatch, torch.bfloat16) > 0


@pytest.mark.parametrize("part_bytes", [1, 1 << 20])
def test_a_part_that_is_lost_is_named_on_both_ranks(monkeypatch: pytest.MonkeyPatch, part_bytes: int) -> None:
    monkeypatch.setattr(schedule, "PART_BYTES", part_bytes)
    finish = Transport._finish

    def broken(self: Transport, pending: object, posts: list[object], buffer: Tensor, destination: LocalPieces) -> None:
        finish(self, pending, posts, buffer, destination)  # type: ignore[arg-type]
        if self._peers.rank == 1:
            for piece in destination._pieces["table"]:
                piece.tensor[:3] = 0.0

    monkeypatch.setattr(Transport, "_finish", broken)

    def sync(peers: Peers) -> object:
        source = pieces(peers.rank, rows, torch.float32, fill=True)
        live = pieces(peers.rank, everything, torch.float32, fill=False)
        return route_of(peers, source, live).run(source, live, 0)

    for error in together(sync):
        assert isinstance(error, WeightMismatchError) and error.weight == "table"


def test_a_peer_that_does_not_come_is_named() -> None:
    over = Event()

    def sync(peers: Peers) -> object:
        source = pieces(peers.rank, rows, torch.float32, fill=True)
        live = pieces(peers.rank, everything, torch.float32, fill=False)
        route = route_of(peers, source, live)
        if peers.rank == 1:  # it is there, but does not take part
            return over.wait(TIMEOUT_S)
        peers.timeout_s = 0.5  # from here on: both ranks were there until now
        try:
            return route.run(source, live, 0)
        finally:
            over.set()

    error, _ = together(sync)
    assert isinstance(error, DeadlineError) and "rank rank 1" in str(error)
