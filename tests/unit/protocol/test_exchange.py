"""The exchange keeps rows bit for bit, moves only those that change rank, and its faults are found."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rlhub.errors import ColumnStoreError, ProtocolError
from rlhub.protocol import DataProto
from rlhub.protocol.batch_ref import BatchRef, ColumnStore
from rlhub.protocol.columns import take_rows
from rlhub.protocol.exchange import RankMoves, RowKeeper, own_store, pack, plan_exchange, unpack
from rlhub.protocol.layout import ColumnInfo, Layout
from tests.support.batch_refs import fetch_from, same_batch, scattered, travelling_bytes

Spoil = Callable[[list[RankMoves]], list[RankMoves]]


def exchange(stores: list[ColumnStore], ref: BatchRef, after: Layout, spoil: Spoil = list) -> tuple[BatchRef, int]:
    """All ranks in this process: what each packs is handed to the others.  Returns the moved batch and the bytes sent."""
    plan = spoil([pickle.loads(pickle.dumps(moves)) for moves in plan_exchange(ref, after, len(stores))])
    packed = [pack(store, moves) for store, moves in zip(stores, plan, strict=True)]
    sent = 0
    for rank, (store, moves) in enumerate(zip(stores, plan, strict=True)):
        came = {source: torch.cat(list(pieces[rank])) for source, (_, pieces) in enumerate(packed) if rank in pieces}
        sent += sum(map(len, came.values()))
        store.put("moved", unpack(packed[rank][0], came, moves))
    return BatchRef(("moved",), ref.small, ref.columns, after), sent


def random_layout(seed: int) -> tuple[DataProto, BatchRef, list[ColumnStore], Layout]:
    """1 to 8 ranks, 0 to 40 rows anywhere, of which some are dropped and some repeated; even parts after the exchange."""
    rng = np.random.default_rng(seed)
    num_ranks, num_rows = int(rng.choice([1, 2, 4, 8])), int(rng.integers(0, 41))
    stores = [ColumnStore(rank) for rank in range(num_ranks)]
    batches = [
        scattered(seed + part, num_rows=num_rows, num_ranks=num_ranks, key=f"k{part}", stores=stores) for part in (0, 1000)
    ]
    ref, whole = BatchRef.concat([batch[1] for batch in batches]), DataProto.concat([batch[0] for batch in batches])
    chosen = rng.integers(0, 2 * num_rows, int(rng.integers(0, 60))) if num_rows else np.zeros(0, dtype=np.int64)
    ref, whole = ref.select_idxs(chosen), whole.select_idxs(chosen)
    after = Layout.even(len(ref), num_ranks)
    if seed % 2:  # parts of any size, in any order
        rank = rng.integers(0, num_ranks, len(ref))
        place = np.zeros(len(ref), dtype=np.int64)
        for index in range(num_ranks):
            rows = rng.permutation(np.flatnonzero(rank == index))
            place[rows] = np.arange(len(rows))
        after = Layout.of(rank, place)
    return whole, ref, stores, after


def bytes_that_change_rank(whole: DataProto, ref: BatchRef, after: Layout) -> int:
    rows = torch.from_numpy(np.flatnonzero(ref.layout.rank != after.rank))
    return sum(travelling_bytes(take_rows(whole.batch[name], rows)) for name in ref.columns)


@pytest.mark.parametrize("block", range(10))
def test_rows_are_kept_bit_for_bit_and_only_those_that_change_rank_move(block: int) -> None:
    """300 layouts in all."""
    for seed in range(30 * block, 30 * block + 30):
        whole, ref, stores, after = random_layout(seed)
        moved, sent = exchange(stores, ref, after)
        assert same_batch(fetch_from(stores, moved), whole), seed
        assert sent == bytes_that_change_rank(whole, ref, after), seed


def shift(plan: list[RankMoves]) -> list[RankMoves]:
    """Every row goes one rank too far."""
    wrong = []
    for moves in plan:
        rows = moves.rows.copy()
        rows[0] = (rows[0] + 1) % len(plan)
        wrong.append(
            RankMoves(moves.rank, moves.keys, moves.columns, rows[:, np.argsort(rows[0], kind="stable")], moves.sources, True)
        )
    return wrong


def permute(plan: list[RankMoves]) -> list[RankMoves]:
    """Each rank believes that its rows came in another order."""
    return [RankMoves(m.rank, m.keys, m.columns, m.rows, m.sources[::-1].copy(), m.moving) for m in plan]


def send_other_places(plan: list[RankMoves]) -> list[RankMoves]:
    """Each rank sends its rows from the wrong places."""
    return [RankMoves(m.rank, m.keys, m.columns, np.stack([*m.rows[:2], m.rows[2][::-1]]), m.sources, m.moving) for m in plan]


@pytest.mark.parametrize("spoil", [shift, permute, send_other_places])
def test_a_wrong_plan_is_caught(spoil: Spoil) -> None:
    """The control of the property above."""
    caught = tried = 0
    for seed in range(0, 80, 2):
        whole, ref, stores, after = random_layout(seed)
        if len(stores) == 1 or len(ref) < 2 * len(stores):
            continue
        tried += 1
        try:
            moved, _ = exchange(stores, ref, after, spoil)
            caught += not same_batch(fetch_from(stores, moved), whole)
        except (ProtocolError, ColumnStoreError):
            caught += 1
    assert tried >= 15 and caught == tried


def test_long_rows_cost_their_bytes() -> None:
    """Only the lengths of ragged rows are bytes that are not values: less than 1.05 of the values' from 100 tokens a row on."""
    rng = np.random.default_rng(0)
    stores = [ColumnStore(rank) for rank in range(4)]
    lengths = rng.integers(50, 150, 64)
    lengths[17] = 32 * 100
    tokens = [torch.from_numpy(rng.integers(0, 9, length)).int() for length in lengths]
    column = torch.nested.as_nested_tensor(tokens, layout=torch.jagged)
    before = Layout.even(64, 4)
    for rank, store in enumerate(stores):
        rows = torch.from_numpy(np.flatnonzero(before.rank == rank))
        store.put("k", {"ids": take_rows(column, rows), "log_probs": take_rows(column, rows).float()})
    infos = {"ids": ColumnInfo.of(column), "log_probs": ColumnInfo(torch.float32, (), True)}
    ref = BatchRef(("k",), DataProto.from_dict({"n": torch.arange(64)}), infos, before)
    order = rng.permutation(64)
    ref.reorder(order)
    changing = lengths[order][ref.layout.rank != before.rank].sum() * (4 + 4)
    moved, sent = exchange(stores, ref, before)
    assert changing < sent <= 1.05 * changing
    assert torch.equal(moved.slice(3, 4).local(stores[0]).batch["ids"].values(), tokens[order[3]])


def test_a_plan_names_rows_that_have_no_home() -> None:
    _, ref, _ = scattered(0, num_rows=4, num_ranks=2)
    with pytest.raises(ProtocolError, match="rank 2 of 2"):
        plan_exchange(ref, Layout.of(2, np.arange(4)), 2)
    with pytest.raises(ProtocolError, match="0, 1, 2 and so on"):
        plan_exchange(ref, Layout.of(0, np.array([0, 1, 1, 2])), 2)


def test_one_rank_moves_nothing() -> None:
    whole, ref, stores = scattered(3, num_rows=9, num_ranks=1)
    keeper = RowKeeper()
    keeper.store = stores[0]
    order = np.random.default_rng(0).permutation(9)
    ref.reorder(order)
    (moves,) = plan_exchange(ref, Layout.even(9, 1), 1)
    assert not moves.moving and keeper.exchange(moves, "next") == 0
    ref = BatchRef(("next",), ref.small, ref.columns, Layout.even(9, 1))
    assert same_batch(ref.local(keeper.store), whole.select_idxs(order))
    with pytest.raises(ColumnStoreError, match="'b0' no columns; it has next"):
        keeper.store.take("b0", ["ids"])
    assert same_batch(keeper.fetch(ref.select_idxs([1])), whole.select_idxs(order[[1]]).select(list(ref.columns), []))
    assert keeper.stored_bytes() > 0
    keeper.drop(["next"])
    assert keeper.stored_bytes() == 0
    with pytest.raises(ProtocolError, match="to rank 1"):
        own_store({1: []})


# -- processes ---------------------------------------------------------------------------------------------------------------


def _rank(rank: int, num_ranks: int, folder: str) -> None:
    """Moves a few layouts over gloo, and compares what this rank then has with the batch in one piece."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=num_ranks)
    for seed, num_rows in ((0, 13), (1, 40), (2, 1), (3, 0)):
        whole, ref, stores = scattered(seed, num_rows=num_rows, num_ranks=num_ranks)
        order = np.random.default_rng(seed).permutation(num_rows)
        ref.reorder(order)
        after = Layout.even(num_rows, num_ranks)
        keeper = RowKeeper()
        keeper.store = stores[rank]
        moves = plan_exchange(ref, after, num_ranks)[rank]
        sent = keeper.exchange(moves, "next")
        mine = BatchRef(("next",), ref.small, ref.columns, after).chunk(num_ranks)[rank]
        assert same_batch(mine.local(keeper.store), whole.select_idxs(order).chunk(num_ranks)[rank]), (rank, seed)
        leaving = torch.from_numpy(order[np.flatnonzero((ref.layout.rank == rank) & (after.rank != rank))])
        payload = sum(travelling_bytes(take_rows(whole.batch[name], leaving)) for name in ref.columns)
        assert sent == payload + (8 * num_ranks if moves.moving else 0), (rank, seed)
    dist.destroy_process_group()
    Path(folder, f"done{rank}").touch()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes_exchange_over_gloo(num_ranks: int, tmp_path: Path) -> None:
    mp.spawn(_rank, args=(num_ranks, str(tmp_path)), nprocs=num_ranks)
    assert len(list(tmp_path.glob("done*"))) == num_ranks
