"""Rows that go from the ranks of one role to those of another: each once, whole groups, the same for peers, batches apart."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import NamedTuple, get_args

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhub.errors import CoordinatorError, DeadlineError
from rlhub.pipeline.coordinator import DataCoordinator, Key, Policy, ReportedRows, RowShare, deal
from rlhub.protocol import BatchRef, DataProto
from rlhub.protocol.columns import dense_rows, jagged, join_tensors, take_rows
from rlhub.protocol.exchange import RowKeeper, plan_transfer
from rlhub.protocol.layout import ColumnInfo
from rlhub.protocol.layout import Layout as RowLayout

POLICIES: tuple[Policy, ...] = get_args(Policy)
WAIT_S = 20.0


class Layout(NamedTuple):
    """Ranks of a role: data, tensor and pipeline parallel."""

    dp: int
    tp: int
    pp: int

    @property
    def producers(self) -> list[int]:
        """The first tensor-parallel rank of the last stage of each copy of the model has its rows."""
        return [self.rank(dp, 0, self.pp - 1) for dp in range(self.dp)]

    def rank(self, dp: int, tp: int, pp: int) -> int:
        return (pp * self.dp + dp) * self.tp + tp

    def dp_rank(self, rank: int) -> int:
        return rank // self.tp % self.dp

    @property
    def size(self) -> int:
        return self.dp * self.tp * self.pp


LAYOUTS = st.builds(Layout, st.integers(1, 6), st.integers(1, 3), st.integers(1, 2))


def parts_of(layout: Layout, sizes: Sequence[int], seed: int, name: str) -> dict[int, ReportedRows]:
    """Parts with so many rows; groups of up to four neighbours, which ranks may share."""
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    groups = np.repeat(np.arange(total), 1 + rng.integers(0, 4, total))[:total]
    bounds = np.cumsum([0, *sizes])
    return {
        rank: ReportedRows(
            lengths=rng.integers(1, 1000, size),
            groups=groups[bounds[index] : bounds[index + 1]],
            ref=f"{name}/{rank}",
            columns=("tokens", name),
        )
        for index, (rank, size) in enumerate(zip(layout.producers, sizes, strict=True))
    }


async def redistribute(
    coordinator: DataCoordinator, key: Key, parts: dict[int, ReportedRows], target: Layout, policy: Policy, rng: random.Random
) -> list[RowShare]:
    """Every rank of the target takes, and every producer reports, in any order; the share of each rank."""

    async def report(rank: int) -> None:
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        coordinator.expect(key, parts)
        coordinator.put(key, {rank: parts[rank]})

    async def take(rank: int) -> RowShare:
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        dp_rank = target.dp_rank(rank)
        return await coordinator.take(key, dp_rank, target.dp, policy=policy, columns=("tokens", key.edge), timeout_s=WAIT_S)

    reports = [report(rank) for rank in parts]
    rng.shuffle(reports)
    takes = [take(rank) for rank in range(target.size)]
    results = await asyncio.gather(*takes, *reports)
    return [share for share in results if share is not None]


def check_shares(shares: list[RowShare], parts: dict[int, ReportedRows], target: Layout, policy: Policy) -> None:
    by_dp: dict[int, list[tuple[int, int]]] = {}
    for rank, share in enumerate(shares):
        rows = list(zip(share.rank.tolist(), share.place.tolist(), strict=True))
        assert by_dp.setdefault(target.dp_rank(rank), rows) == rows, "tensor- and pipeline-parallel peers get the same rows"
        assert share.refs == {producer: parts[producer].ref for producer in set(share.rank.tolist())}
        assert rows == sorted(rows)
    taken = [row for rows in by_dp.values() for row in rows]
    assert sorted(taken) == sorted((rank, place) for rank, part in parts.items() for place in range(len(part.lengths)))
    counts = [len(rows) for rows in by_dp.values()]
    if policy != "groups":
        assert max(counts) - min(counts) <= 1
        return
    homes: dict[int, set[int]] = {}
    for dp, rows in by_dp.items():
        for producer, place in rows:
            groups = parts[producer].groups
            assert groups is not None
            homes.setdefault(int(groups[place]), set()).add(dp)
    assert all(len(found) == 1 for found in homes.values()), "a group was cut"


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(LAYOUTS, LAYOUTS, LAYOUTS, st.sampled_from(POLICIES), st.data())
def test_rows_go_from_any_layout_to_any_other(
    source: Layout, target: Layout, other: Layout, policy: Policy, data: st.DataObject
) -> None:
    """Two edges in one step, with other rows and other ranks; parts are ragged, and some are empty."""
    seed = data.draw(st.integers(0, 1 << 30))
    rng = random.Random(seed)
    edges = {
        edge: parts_of(source, [rng.choice((0, 1, 2, 7, 12)) for _ in range(source.dp)], seed + index, edge)
        for index, edge in enumerate(("rollout-actor", "actor-critic"))
    }

    found = asyncio.run(in_one_step(edges, [target, other], policy, rng))
    for parts, to, shares in zip(edges.values(), (target, other), found, strict=True):
        check_shares(shares, parts, to, policy)


async def in_one_step(
    edges: dict[str, dict[int, ReportedRows]], targets: Sequence[Layout], policy: Policy, rng: random.Random
) -> list[list[RowShare]]:
    """Returns the shares of every rank, by edge."""
    coordinator = DataCoordinator()
    pairs = zip(edges.items(), targets, strict=True)
    calls = (redistribute(coordinator, Key(1, edge), parts, target, policy, rng) for (edge, parts), target in pairs)
    shares = await asyncio.gather(*calls)
    coordinator.drop(1)
    assert coordinator.num_batches == 0
    return list(shares)


Rows = dict[str, torch.Tensor]


def keep(layout: Layout, parts: dict[int, ReportedRows], edge: str, keepers: Sequence[RowKeeper]) -> tuple[Rows, dict[int, int]]:
    """Puts rows under the edge into the stores of the ranks that report them; returns all rows in order, and the number of the
    first of each rank."""
    columns: dict[str, list[torch.Tensor]] = {"tokens": [], "number": []}
    first, firsts = 0, {}
    for rank in layout.producers:
        firsts[rank] = first
        lengths = torch.from_numpy(parts[rank].lengths % 9)
        tokens = torch.arange(int(lengths.sum()), dtype=torch.int32) + 1000 * first
        rows = {"tokens": jagged(tokens, lengths), "number": torch.arange(first, first + len(lengths))}
        keepers[rank].store.put(edge, rows)
        for name, column in rows.items():
            columns[name].append(column)
        first += len(lengths)
    return {name: join_tensors(column) for name, column in columns.items()}, firsts


def move(shares: list[RowShare], source: Layout, target: Layout, edge: str, keepers: Sequence[RowKeeper]) -> list[RowKeeper]:
    """Sends the rows of every share to all ranks that have it, as the groups of two roles do; returns their stores."""
    leaders = [target.rank(dp, 0, 0) for dp in range(target.dp)]
    chosen = [shares[leader] for leader in leaders]
    rank, place = (np.concatenate([getattr(share, name) for share in chosen]) for name in ("rank", "place"))
    small = DataProto.from_dict({"row": torch.arange(len(rank))})
    columns = {"tokens": ColumnInfo(torch.int32, (), ragged=True), "number": ColumnInfo(torch.int64, ())}
    ref = BatchRef((edge,), small, columns, RowLayout.of(rank, place))
    after = RowLayout.parts(leaders, list(map(len, chosen)))
    sends, receives = plan_transfer(ref, after, (source.size, target.size))
    sent = {producer: keepers[producer].send(moves)[0] for producer, moves in enumerate(sends) if moves.rows.size}
    came = [RowKeeper() for _ in range(target.size)]
    for rank_of_target, keeper in enumerate(came):
        leader = leaders[target.dp_rank(rank_of_target)]
        handles = {producer: pieces[leader] for producer, pieces in sent.items() if leader in pieces}
        keeper.receive(receives[leader], edge, "source", handles)
    return came


@pytest.mark.parametrize("block", range(10))
def test_rows_go_from_the_stores_of_one_role_to_those_of_another(block: int) -> None:
    """300 cases in all, each with two edges in one step and through the same stores: every rank has the rows of its share."""
    for seed in range(30 * block, 30 * block + 30):
        rng = random.Random(seed)
        source, *targets = (Layout(rng.randint(1, 6), rng.randint(1, 3), rng.randint(1, 2)) for _ in range(3))
        policy, keepers = rng.choice(POLICIES), [RowKeeper() for _ in range(source.size)]
        for rank, keeper in enumerate(keepers):
            keeper.place(rank, "cpu")
        edges = {
            edge: parts_of(source, [rng.choice((0, 1, 2, 5)) for _ in range(source.dp)], seed + index, edge)
            for index, edge in enumerate(("rollout-actor", "actor-critic"))
        }
        kept = {edge: keep(source, parts, edge, keepers) for edge, parts in edges.items()}
        shares = asyncio.run(in_one_step(edges, targets, policy, rng))
        for edge, target, share in zip(edges, targets, shares, strict=True):
            check_shares(share, edges[edge], target, policy)
            check_stores(move(share, source, target, edge, keepers), share, edge, *kept[edge])
        for keeper in keepers:
            keeper.drop(list(edges))
            assert keeper.stored_bytes() == 0


def check_stores(came: list[RowKeeper], shares: list[RowShare], edge: str, whole: Rows, firsts: dict[int, int]) -> None:
    for keeper, share in zip(came, shares, strict=True):
        numbers = [firsts[rank] + place for rank, place in zip(share.rank.tolist(), share.place.tolist(), strict=True)]
        found = keeper.store.take(edge, list(whole))
        for name, column in whole.items():
            expected = take_rows(column, torch.tensor(numbers, dtype=torch.int64))
            parts = (
                zip(dense_rows(found[name]), dense_rows(expected), strict=True) if column.is_nested else [(found[name], expected)]
            )
            assert all(torch.equal(*part) for part in parts)


def test_a_row_that_goes_astray_is_noticed() -> None:
    """The control: two ranks of the source have each other's rows."""
    source, target, rng = Layout(2, 1, 1), Layout(3, 2, 1), random.Random(0)
    parts, keepers = parts_of(source, [7, 7], 0, "edge"), [RowKeeper(), RowKeeper()]
    kept = keep(source, parts, "edge", keepers)
    ((share,),) = [asyncio.run(in_one_step({"edge": parts}, [target], "even", rng))]
    with pytest.raises(AssertionError):
        check_stores(move(share, source, target, "edge", keepers[::-1]), share, "edge", *kept)


class Unkeyed(DataCoordinator):
    """Keeps batches by step alone."""

    def _find(self, key: Key):  # type: ignore[no-untyped-def]
        return super()._find(Key(key.step, ""))


class Newest(Unkeyed):
    """Keeps batches by step alone, and the newest report of a rank."""

    def put(self, key: Key, parts: dict[int, ReportedRows]) -> None:  # type: ignore[override]
        batch = self._find(key)
        batch.parts.update(parts)
        batch.complete()


@pytest.mark.parametrize("broken", [Unkeyed, Newest])
def test_without_the_edge_two_batches_of_a_step_collide(broken: type[DataCoordinator]) -> None:
    """The control of the test above."""
    layout = Layout(2, 1, 1)
    edges = {edge: parts_of(layout, [3, 2], index, edge) for index, edge in enumerate(("a", "b"))}

    async def step(coordinator: DataCoordinator) -> None:
        for edge, parts in edges.items():
            coordinator.expect(Key(1, edge), parts)
            coordinator.put(Key(1, edge), parts)
        for edge, parts in edges.items():
            shares = [await coordinator.take(Key(1, edge), dp, 2, columns=(edge,)) for dp in range(2)]
            check_shares(shares, parts, layout, "even")

    asyncio.run(step(DataCoordinator()))
    with pytest.raises(CoordinatorError, match="reports twice|has no column 'a'"):
        asyncio.run(step(broken()))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_share_does_not_depend_on_what_came_first(policy: Policy) -> None:
    layout = Layout(5, 1, 1)
    parts = parts_of(layout, [7, 0, 3, 12, 1], 3, "x")

    async def shares(seed: int) -> list[list[int]]:
        found = await redistribute(DataCoordinator(), Key(2, "x"), parts, Layout(3, 2, 1), policy, random.Random(seed))
        return [[*share.rank.tolist(), *share.place.tolist()] for share in found]

    assert len({str(asyncio.run(shares(seed))) for seed in range(10)}) == 1


def test_balanced_shares_have_about_the_same_tokens() -> None:
    lengths = np.random.default_rng(0).integers(1, 4096, 1000)
    groups = np.repeat(np.arange(500), 2)
    even, balanced, whole = (
        [int(lengths[rows].sum()) for rows in deal(lengths, groups if policy == "groups" else None, 16, policy)]
        for policy in POLICIES
    )
    mean = lengths.sum() / 16
    assert max(balanced) <= 1.001 * mean and max(whole) <= 1.01 * mean < 1.05 * mean < max(even)


@pytest.mark.parametrize("policy", POLICIES)
def test_fewer_rows_than_ranks_and_none_at_all(policy: Policy) -> None:
    for num_rows in (0, 2):
        shares = deal(np.ones(num_rows, dtype=np.int64), np.arange(num_rows), 5, policy)
        assert len(shares) == 5 and sorted(np.concatenate(shares).tolist()) == list(range(num_rows))


def report(*, rows: int = 2, columns: Sequence[str] = ("tokens",), grouped: bool = True) -> ReportedRows:
    return ReportedRows(lengths=np.ones(rows), groups=np.arange(rows) if grouped else None, ref="r", columns=columns)


def test_what_ranks_do_not_agree_on_is_named() -> None:
    key = Key(1, "e")

    def fresh() -> DataCoordinator:
        coordinator = DataCoordinator(max_steps=2)
        coordinator.expect(key, [0, 1])
        coordinator.put(key, {0: report()})
        return coordinator

    with pytest.raises(CoordinatorError, match="batch 'e' of step 1: rank 0 reports twice; two batches of a step need edges"):
        fresh().put(key, {0: report()})
    with pytest.raises(CoordinatorError, match="rank 7 reports, and only 0, 1 are expected to"):
        fresh().put(key, {7: report()})
    with pytest.raises(CoordinatorError, match="is expected from ranks 0, 1, and now from 0, 2"):
        fresh().expect(key, [2, 0])
    with pytest.raises(CoordinatorError, match="at least one rank"):
        fresh().expect(Key(1, "f"), [])
    with pytest.raises(CoordinatorError, match="one length a row"):
        fresh().put(key, {1: ReportedRows(lengths=np.ones((2, 2)))})
    late = DataCoordinator()
    late.put(key, {3: report()})
    with pytest.raises(CoordinatorError, match="ranks 3 have reported, and only 0, 1 are expected to"):
        late.expect(key, [0, 1])


async def taken(coordinator: DataCoordinator, **options: object) -> RowShare:
    key = Key(1, "e")
    coordinator.expect(key, [0])
    coordinator.put(key, {0: report(columns=("tokens", "scores"), grouped=bool(options.pop("grouped", True)))})
    return await coordinator.take(key, 0, 1, **options)  # type: ignore[arg-type]


def test_missing_columns_and_groups_are_named() -> None:
    with pytest.raises(
        CoordinatorError, match=r"rank 0 has no column 'score'; did you mean 'scores'\?; it reported: tokens, scores"
    ):
        asyncio.run(taken(DataCoordinator(), columns=("score",)))
    with pytest.raises(CoordinatorError, match="needs the group of every row"):
        asyncio.run(taken(DataCoordinator(), policy="groups", grouped=False))
    with pytest.raises(CoordinatorError, match="data-parallel rank 2 of 2"):
        asyncio.run(DataCoordinator().take(Key(1, "e"), 2, 2))


def test_a_wait_has_a_deadline_that_names_who_is_missing() -> None:
    async def wait(expected: Sequence[int]) -> None:
        coordinator = DataCoordinator()
        if expected:
            coordinator.expect(Key(1, "e"), expected)
            coordinator.put(Key(1, "e"), {0: report()})
        await coordinator.take(Key(1, "e"), 0, 1, timeout_s=0.01)

    many = ", ".join(str(rank) for rank in range(1, 9))
    with pytest.raises(
        DeadlineError, match=f"take of batch 'e' of step 1: not done after 0.01 s; missing: ranks {many} and 3 more"
    ):
        asyncio.run(wait(range(12)))
    with pytest.raises(DeadlineError, match="nobody has said which ranks report"):
        asyncio.run(wait([]))


def test_steps_are_dropped_and_bounded() -> None:
    async def run() -> None:
        coordinator = DataCoordinator(max_steps=2)
        for step in (1, 2):
            coordinator.expect(Key(step, "e"), [0])
        with pytest.raises(CoordinatorError, match="would make 3 steps that are kept, of at most 2.*kept are 1, 2, 3"):
            coordinator.expect(Key(3, "e"), [0])
        waiting = asyncio.create_task(coordinator.take(Key(1, "e"), 0, 1, timeout_s=WAIT_S))
        await asyncio.sleep(0)
        coordinator.drop(1)
        with pytest.raises(CoordinatorError, match="batch 'e' of step 1 was dropped while data-parallel rank 0 waited"):
            await waiting
        with pytest.raises(CoordinatorError, match="comes too late: step 1 was dropped"):
            coordinator.put(Key(1, "f"), {0: report()})
        coordinator.expect(Key(3, "e"), [0])
        assert coordinator.num_batches == 2

    asyncio.run(run())
