"""Rows reach every rank of a shard, within a group and between groups, and a wrong plan is caught."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlhub.errors import ColumnStoreError, ProtocolError
from rlhub.protocol import DataProto
from rlhub.protocol.batch_ref import BatchRef, ColumnStore
from rlhub.protocol.columns import take_rows
from rlhub.protocol.exchange import RankMoves, RowKeeper, pack, plan_exchange, plan_transfer, unpack
from rlhub.protocol.layout import Layout
from rlhub.single_controller import Mesh
from tests.support.batch_refs import same_batch, scattered, travelling_bytes

Spoil = Callable[[list[RankMoves]], list[RankMoves]]


def mesh_of(dp: int, shared: int, rng: np.random.Generator) -> Mesh:
    """dp parts of `shared` ranks each, neighbours or not, of which any collects."""
    parts = np.repeat(np.arange(dp), shared)
    if rng.random() < 0.5:
        parts = rng.permutation(parts)
    collecting = [int(rng.choice(np.flatnonzero(parts == part))) for part in range(dp)]
    return Mesh(name="any", dp_ranks=tuple(parts.tolist()), collecting=tuple(collecting))


@dataclass(slots=True)
class Case:
    """Rows, scattered over the collecting ranks of a mesh, and the mesh to which they go."""

    whole: DataProto
    ref: BatchRef
    stores: list[ColumnStore]
    before: Mesh
    to: Mesh
    groups: np.ndarray


def random_case(seed: int, *, same_ranks: bool) -> Case:
    """Up to 8 ranks in shards of 1 to 4, and 0 to 40 rows in groups of 1 to 4 neighbours, of which some are chosen."""
    rng = np.random.default_rng(seed)
    shapes = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4)]
    before = mesh_of(*shapes[rng.integers(len(shapes))], rng)
    fitting = [shape for shape in shapes if not same_ranks or shape[0] * shape[1] == len(before.dp_ranks)]
    to = mesh_of(*fitting[rng.integers(len(fitting))], rng)
    size, num_groups = int(rng.integers(1, 5)), int(rng.integers(0, 11))
    whole, ref, parts = scattered(seed, num_rows=size * num_groups, num_ranks=before.dp_size)
    homes = np.array(before.collecting)
    stores = [ColumnStore(rank) for rank in range(len(before.dp_ranks))]
    for home, part in zip(homes, parts, strict=True):
        stores[home].put("b0", part.take("b0", list(ref.columns)))
    ref.layout = Layout(homes[ref.layout.rank].astype(np.int32), ref.layout.key, ref.layout.place)
    chosen = rng.permutation(num_groups)[: rng.integers(0, num_groups + 1)]
    rows = (chosen[:, None] * size + np.arange(size)).ravel()
    return Case(whole.select_idxs(rows), ref.select_idxs(rows), stores, before, to, np.repeat(chosen, size))


def within(case: Case, spoil: Spoil = list) -> tuple[list[ColumnStore], int]:
    """The exchange within a group, all ranks in this process.  Returns the stores, and the bytes sent."""
    after = Layout.even(len(case.ref), case.to.collecting)
    plan = spoil([pickle.loads(pickle.dumps(m)) for m in plan_exchange(case.ref, after, len(case.stores), case.to.copies)])
    packed = [pack(store, moves) for store, moves in zip(case.stores, plan, strict=True)]
    sent = 0
    for rank, (store, moves) in enumerate(zip(case.stores, plan, strict=True)):
        came = {source: torch.cat(list(pieces[rank])) for source, (_, pieces) in enumerate(packed) if rank in pieces}
        sent += sum(map(len, came.values()))
        store.drop("b0")
        store.put("moved", unpack(packed[rank][0], came, moves))
    return case.stores, sent


def between(case: Case, spoil: Spoil = list) -> tuple[list[ColumnStore], int]:
    """The transfer to the ranks of another group.  Returns the stores of these, and the bytes put."""
    after = Layout.even(len(case.ref), case.to.collecting)
    sends, receives = plan_transfer(case.ref, after, (len(case.stores), len(case.to.dp_ranks)))
    senders, receivers = [RowKeeper() for _ in case.stores], [RowKeeper() for _ in case.to.dp_ranks]
    handles: list[dict[int, Any]] = [{} for _ in receivers]
    num_bytes = 0
    for rank, (keeper, moves) in enumerate(zip(senders, spoil(pickle.loads(pickle.dumps(sends))), strict=True)):
        keeper.store = case.stores[rank]
        pieces, sent = keeper.send(moves)
        num_bytes += sent
        for target, handle in pieces.items():
            handles[target][rank] = handle
    for rank, keeper in enumerate(receivers):
        home = case.to.copies.get(rank, rank)
        keeper.receive(pickle.loads(pickle.dumps(receives[home])), "moved", "sender", handles[home])
    return [keeper.store for keeper in receivers], num_bytes


def is_whole(case: Case, stores: list[ColumnStore]) -> bool:
    """Whether every rank of every shard has exactly its shard's part, bit for bit."""
    after = Layout.even(len(case.ref), case.to.collecting)
    moved = BatchRef(("moved",), case.ref.small, case.ref.columns, after, copies=case.to.copies)
    refs, wholes = moved.chunk(case.to.dp_size), case.whole.chunk(case.to.dp_size)
    for rank, part in enumerate(case.to.dp_ranks):
        stores[rank].rank = rank
        columns = stores[rank].take("moved", list(case.ref.columns))
        if any(len(column) != len(wholes[part]) for column in columns.values()):
            return False
        if not same_batch(refs[part].local(stores[rank]), wholes[part]):
            return False
    return True


def bytes_of(case: Case, rows: np.ndarray) -> int:
    index = torch.from_numpy(np.flatnonzero(rows))
    return sum(travelling_bytes(take_rows(case.whole.batch[name], index)) for name in case.ref.columns)


@pytest.mark.parametrize("block", range(10))
def test_every_rank_of_a_shard_has_its_part(block: int) -> None:
    """300 cases in all: (dp, tp) to (dp', tp') of the same ranks, and only rows that a rank lacks move to it."""
    for seed in range(30 * block, 30 * block + 30):
        case = random_case(seed, same_ranks=True)
        stores, sent = within(case)
        assert is_whole(case, stores), seed
        parts = Layout.even(len(case.ref), case.to.dp_size).rank
        missing = [bytes_of(case, (parts == part) & (case.ref.layout.rank != rank)) for rank, part in enumerate(case.to.dp_ranks)]
        assert sent == sum(missing), seed


@pytest.mark.parametrize("block", range(10))
def test_every_rank_of_another_groups_shard_has_its_part(block: int) -> None:
    """300 cases in all: every row is put once, however many ranks of a shard read it, and stays with its own rank."""
    for seed in range(30 * block, 30 * block + 30):
        case = random_case(seed, same_ranks=False)
        stores, sent = between(case)
        assert is_whole(case, stores), seed
        assert sent == bytes_of(case, np.ones(len(case.ref), dtype=bool)), seed
        homes = BatchRef(("b0",), case.ref.small, case.ref.columns, case.ref.layout)
        for rank in set(case.ref.layout.rank.tolist()):
            mine = case.ref.layout.rank == rank
            assert same_batch(homes.select_idxs(mine).local(case.stores[rank]), case.whole.select_idxs(mine)), seed


def to_a_neighbour(plan: list[RankMoves]) -> list[RankMoves]:
    """Every row goes to the rank before its own."""
    wrong = []
    for moves in plan:
        rows = moves.rows.copy()
        rows[0] = np.maximum(rows[0] - 1, 0)
        wrong.append(replace(moves, rows=rows))
    return wrong


def other_places(plan: list[RankMoves]) -> list[RankMoves]:
    """Each rank sends its rows from the wrong places."""
    return [replace(m, rows=np.stack([*m.rows[:2], m.rows[2][::-1]])) for m in plan]


def other_sources(plan: list[RankMoves]) -> list[RankMoves]:
    """Each rank believes that its rows came in another order."""
    return [replace(m, sources=m.sources[::-1].copy()) for m in plan]


@pytest.mark.parametrize(
    ("move", "spoil"),
    [
        (within, to_a_neighbour),
        (within, other_places),
        (within, other_sources),
        (between, to_a_neighbour),
        (between, other_places),  # a sender of another group has no sources
    ],
)
def test_a_wrong_plan_is_caught(move: Callable[[Case, Spoil], Any], spoil: Spoil) -> None:
    """The control of the properties above."""
    caught, tried = 0, 0

    def counted(plan: list[RankMoves]) -> list[RankMoves]:
        nonlocal tried
        wrong = spoil(plan)
        tried += pickle.dumps(wrong) != pickle.dumps(plan)
        return wrong

    for seed in range(240):
        case = random_case(seed, same_ranks=move is within)
        if case.to.dp_size == 1 or len(case.ref) < 2 * len(case.to.dp_ranks) or len(set(case.ref.layout.rank.tolist())) == 1:
            continue
        try:
            caught += not is_whole(case, move(case, counted)[0])
        except (ProtocolError, ColumnStoreError):
            caught += 1
    assert tried >= 10 and caught == tried


# -- processes ---------------------------------------------------------------------------------------------------------------


def _rank(rank: int, num_ranks: int, folder: str) -> None:
    """Moves rows over gloo from meshes to others of the same ranks, and compares what this rank then has."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks)
    tried, seed = 0, 0
    while tried < 8:
        seed += 1
        case = random_case(seed, same_ranks=True)
        if len(case.stores) != num_ranks:
            continue
        tried += 1
        keeper = RowKeeper()
        keeper.store = case.stores[rank]
        after = Layout.even(len(case.ref), case.to.collecting)
        moves = plan_exchange(case.ref, after, num_ranks, case.to.copies)[rank]
        keeper.exchange(moves, "moved")
        part = BatchRef(("moved",), case.ref.small, case.ref.columns, after, copies=case.to.copies)
        mine = part.chunk(case.to.dp_size)[case.to.dp_ranks[rank]]
        expected = case.whole.chunk(case.to.dp_size)[case.to.dp_ranks[rank]]
        assert same_batch(mine.local(keeper.store), expected), (rank, seed)
    dist.destroy_process_group()
    Path(folder, f"done{rank}").touch()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes_share_parts_over_gloo(num_ranks: int, tmp_path: Path) -> None:
    mp.spawn(_rank, args=(num_ranks, str(tmp_path)), nprocs=num_ranks)
    assert len(list(tmp_path.glob("done*"))) == num_ranks
