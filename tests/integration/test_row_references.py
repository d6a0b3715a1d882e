"""Batches by reference through Ray: rows stay with their ranks, move within and between groups, and cost the driver nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from ray.exceptions import GetTimeoutError, RayError

from rlhub.errors import ProtocolError, WorkerDiedError
from rlhub.protocol import BatchRef, DataProto
from rlhub.single_controller import (
    AsyncActorOptions,
    ClassWithInitArgs,
    Launched,
    LaunchOptions,
    ObservedCall,
    WorkerGroup,
    launch,
    start_async_actor,
)
from scripts.bench.driver_traffic import Pickled
from tests.support.batch_refs import same_batch
from tests.support.row_calls import check_joined, check_life, check_refusals, prompts, sampled
from tests.support.row_workers import Echo, RowWorker

RANKS = 2


class Counted:
    """Adds up what observers learn."""

    def __init__(self) -> None:
        self.sent = self.received = 0

    def on_start(self, call: ObservedCall) -> None: ...

    def on_end(self, call: ObservedCall, seconds: float, error: BaseException | None) -> None: ...

    def on_transfer(self, call: ObservedCall, *, sent: int = 0, received: int = 0) -> None:
        self.sent += sent
        self.received += received


@pytest.fixture(scope="module")
def counted() -> Counted:
    return Counted()


@pytest.fixture(scope="module")
def run(counted: Counted) -> Iterator[Launched]:
    """Two ranks with three roles, of which "wide" has one part for both; "critic" is alone on one rank, "pair" on two."""
    roles = {role: ClassWithInitArgs(RowWorker) for role in ("rollout", "actor", "critic")}
    roles |= {role: ClassWithInitArgs(RowWorker, 2) for role in ("wide", "pair")}
    options = LaunchOptions(
        backend="ray",
        ranks_per_node=RANKS,
        pools={"one": [1], "two": [2]},
        placement={"critic": "one", "pair": "two"},
        observers=[counted],
    )
    with launch(roles, options) as run:
        run.groups["actor"].join()
        yield run


@pytest.mark.parametrize("check", [check_life, check_joined, check_refusals])
def test_through_ray(run: Launched, check: Callable[[WorkerGroup], None]) -> None:
    check(run.groups["rollout"])


def test_colocated_roles_read_what_another_left(run: Launched) -> None:
    rollout, actor = run.groups["rollout"], run.groups["actor"]
    whole, ref = sampled(rollout, "shared")
    order = np.arange(16)[::-1].copy()
    ref.reorder(order)
    with pytest.raises(ProtocolError, match="8 of the 8 rows that rank 0 shall compute on are on other ranks"):
        actor.read(ref)
    before = actor.exchanged_bytes
    ref = actor.exchange(ref, "actor")
    assert actor.read(ref).batch["length"].tolist() == whole.batch["length"][order.tolist()].tolist()
    assert actor.read(ref).batch["made_by"].tolist() == [1] * 8 + [0] * 8
    lengths = int(whole.batch["length"].sum())
    assert actor.exchanged_bytes - before == 16 * (4 * 8 + 2 + 4) + 8 * lengths + RANKS * 8 * RANKS
    rollout.drop(ref)


def rows_of(group: WorkerGroup, key: str, order: np.ndarray) -> tuple[DataProto, BatchRef]:
    """Samples in one piece and by reference, in an order."""
    whole, ref = sampled(group, key)
    for data in (whole, ref):
        data.meta_info.clear()
        data.reorder(order)
    return whole, ref


def stored(run: Launched) -> int:
    return sum(sum(run.groups[role].stored_bytes()) for role in ("actor", "critic", "pair"))


def test_ranks_of_one_shard_share_a_part(run: Launched) -> None:
    """Both ranks of "wide" have all rows: each reads its own store, and what both compute stays with both."""
    rollout, wide = run.groups["rollout"], run.groups["wide"]
    whole, ref = rows_of(rollout, "parts", np.random.default_rng(1).permutation(16))
    assert same_batch(wide.read(ref), whole), "rows of other ranks are copied for the call"
    ref = wide.exchange(ref, "actor")
    assert wide.exchange(ref, "actor") is ref and set(ref.layout.rank.tolist()) == {0} and ref.copies == {1: 0}
    assert same_batch(wide.read(ref), whole)
    added = wide.add_up.retain("wide")(ref)
    assert added.small.batch["rank"].tolist() == [0] * 16
    ref.union(added)
    whole.union(wide.add_up(whole))
    assert same_batch(wide.read(ref), whole)
    everywhere = wide.sums_of_all_ranks(ref)
    assert everywhere[0] == everywhere[1] == int(whole.batch["wide"].sum()), "the rank that does not collect has the column too"
    parts = run.groups["actor"].exchange(ref, "actor")
    assert same_batch(run.groups["actor"].read(parts), whole)
    assert parts.copies == {} and set(parts.layout.rank.tolist()) == {0, 1}
    wide.drop(parts)
    assert stored(run) == 0, "copies are dropped as well"


def test_an_exchange_waits_for_no_group_that_forgets_its_copies(run: Launched, tmp_path: Path) -> None:
    """Calls that were sent before still read the copies, and a later count finds none.  The control is a call that waits."""
    rollout, actor, critic = run.groups["rollout"], run.groups["actor"], run.groups["critic"]
    whole, ref = rows_of(rollout, "copied", np.arange(16)[::-1].copy())
    critic.read(ref)
    assert sum(critic.stored_bytes()) > 0
    busy, reading = critic.rest.submit(str(tmp_path / "over")), critic.read.submit(ref)
    moved = actor.exchange(ref, "actor")
    assert not busy.done(), "the exchange was over first"
    (tmp_path / "over").touch()
    assert sum(critic.stored_bytes()) == 0 and busy.done()
    assert same_batch(reading.get(), whole) and same_batch(actor.read(moved), whole)
    actor.drop(moved)
    assert stored(run) == 0


@pytest.mark.parametrize("role", ["critic", "pair"])
def test_rows_go_to_other_processes_and_results_come_back(run: Launched, role: str) -> None:
    rollout, actor, other = run.groups["rollout"], run.groups["actor"], run.groups[role]
    whole, ref = rows_of(rollout, f"to {role}", np.random.default_rng(2).permutation(16))
    ref = actor.exchange(ref, "actor")
    theirs = other.receive(ref.select(["tokens", "padded"]), "actor")
    assert same_batch(other.read(theirs), whole.select(["tokens", "padded"]))
    assert set(theirs.columns) == {"tokens", "padded"}, "only named columns travel"
    values = other.add_up.retain("wide")(theirs, factor=5).select(["wide", "sum"])
    ref.union(actor.receive(values, ref))
    whole.union(other.add_up(whole, factor=5).select(["wide", "sum"]))
    assert same_batch(actor.read(ref), whole)
    assert actor.receive(ref, "actor") is ref, "nothing moves where the ranks have the rows"
    with pytest.raises(ProtocolError, match="different worker groups"):
        BatchRef.concat([ref.select(["padded"], []), theirs.select(["padded"], [])])
    other.drop(theirs)
    actor.drop(ref)
    assert stored(run) == 0


def test_an_exchange_brings_rows_from_other_processes_and_leaves_none(run: Launched) -> None:
    """The rollout on a pool of its own, tensor-parallel: its rows are read from the rank that collects, and all copies go."""
    pair, actor = run.groups["pair"], run.groups["actor"]
    whole, ref = rows_of(pair, "pools", np.arange(16))
    assert ref.copies == {1: 0} and same_batch(pair.read(ref), whole)
    whole.reorder(np.arange(16)[::-1])
    ref.reorder(np.arange(16)[::-1])
    ref = actor.exchange(ref, "actor")
    assert same_batch(actor.read(ref), whole)
    assert sum(pair.stored_bytes()) == 0 < sum(actor.stored_bytes())
    actor.drop(ref)


def moved_by(counted: Counted, work: Callable[[], object]) -> tuple[Counted, Pickled]:
    """The bytes of some work as observers learn them, and those that Ray pickles and reads in this process."""
    before = counted.sent, counted.received
    real, estimate = Pickled(), Counted()
    with real.counting():
        work()
    estimate.sent, estimate.received = counted.sent - before[0], counted.received - before[1]
    return estimate, real


def test_counted_bytes_are_those_that_cross_this_process(run: Launched, counted: Counted) -> None:
    """Up to what a call costs that carries nothing: header, names and results such as None, for each rank."""
    rollout, actor, pair = run.groups["rollout"], run.groups["actor"], run.groups["pair"]
    actor.join()
    a_call = 1500 * RANKS
    ref = sampled(rollout, "counted", 2000)[1]

    def by_reference() -> None:
        nonlocal ref
        ref.reorder(np.random.default_rng(0).permutation(len(ref)))
        ref = pair.exchange(actor.exchange(ref, "actor"), "actor")
        ref.union(pair.add_up.retain("wide")(ref))

    estimate, real = moved_by(counted, by_reference)
    assert 0 <= real.out - estimate.sent <= 6 * a_call and 0 <= real.into - estimate.received <= 6 * a_call
    estimate, real = moved_by(counted, lambda: ref.fetch(["padded"]))
    assert real.into > 2000 * 2 * 4 * 8 and 0 <= real.into - estimate.received <= a_call, "the control: rows that do enter"
    pair.drop(ref)


def test_calls_of_actors_are_counted_as_those_of_workers_are(run: Launched) -> None:
    counted = Counted()
    actor = start_async_actor(ClassWithInitArgs(Echo), AsyncActorOptions(name="echo", num_cpus=0.0, observers=[counted]))
    value = os.urandom(300_000)
    try:
        estimate, real = moved_by(counted, lambda: asyncio.run(actor.call("echo", value)))
    finally:
        actor.kill()
    assert estimate.sent > len(value) < estimate.received
    assert 0 <= real.out - estimate.sent <= 4000 and 0 <= real.into - estimate.received <= 4000


def test_rows_of_a_process_that_dies_are_reported_with_their_rank(run: Launched) -> None:
    """The last test of these processes: the owner of the pieces is killed after it has put them."""
    pair, actor = run.groups["pair"], run.groups["actor"]
    _, ref = sampled(pair, "lost")
    real = pair._call_rows

    def put_and_die(method: str, calls: list[tuple[object, ...]]) -> object:
        put = real(method, calls)
        os.kill(pair.workers[0].pid, signal.SIGKILL)
        ((handles, _),) = put.values()
        deadline = time.monotonic() + 60
        with pytest.raises(RayError) as known:  # as soon as the cluster knows of the death
            while time.monotonic() < deadline:
                ray.get(handles[0][0], timeout=60.0)
                time.sleep(0.1)
        assert not isinstance(known.value, GetTimeoutError)
        return put

    pair._call_rows = put_and_die  # type: ignore[method-assign, assignment]
    with pytest.raises(WorkerDiedError, match=f"process {pair.workers[0].pid} died") as died:
        actor.exchange(ref, "actor")
    assert (died.value.role, died.value.rank) == ("pair", 0)
    del pair._call_rows  # type: ignore[method-assign]
    with pytest.raises(WorkerDiedError) as died:
        actor.exchange(ref, "actor")
    assert (died.value.role, died.value.rank) == ("pair", 0), "the calls of rows name the role as others do"
    assert len(run.groups["rollout"].generate(prompts(4))) == 8, "the ranks that wanted them go on"
