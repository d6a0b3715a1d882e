"""Batches by reference through Ray: rows stay with their ranks, move over gloo, and cost the driver nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rlhub.errors import DispatchError, ProtocolError
from rlhub.single_controller import ClassWithInitArgs, Launched, LaunchOptions, WorkerGroup, launch
from tests.support.row_calls import check_joined, check_life, check_refusals, sampled
from tests.support.row_workers import RowWorker

RANKS = 2


@pytest.fixture(scope="module")
def run() -> Iterator[Launched]:
    roles = {
        "rollout": ClassWithInitArgs(RowWorker),
        "actor": ClassWithInitArgs(RowWorker),
        "wide": ClassWithInitArgs(RowWorker, 2),
    }
    with launch(roles, LaunchOptions(backend="ray", ranks_per_node=RANKS)) as run:
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


def test_ranks_that_share_a_part_are_refused(run: Launched) -> None:
    _, ref = sampled(run.groups["rollout"], "refused")
    with pytest.raises(DispatchError, match=r"mesh 'actor' gives the ranks the parts \[0, 0\].*not supported"):
        run.groups["wide"].exchange(ref, "actor")
    run.groups["rollout"].drop(ref)
