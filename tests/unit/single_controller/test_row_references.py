"""Batches by reference in process: worker methods get DataProto and know nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rlhub.single_controller import ClassWithInitArgs, WorkerGroup, launch
from rlhub.single_controller.resources import LaunchOptions
from tests.support.batch_refs import same_batch
from tests.support.row_calls import check_joined, check_life, check_refusals, sampled
from tests.support.row_workers import RowWorker


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    with launch({"rollout": ClassWithInitArgs(RowWorker)}, LaunchOptions(backend="local")) as run:
        yield run.groups["rollout"]


@pytest.mark.parametrize("check", [check_life, check_joined, check_refusals])
def test_in_process(group: WorkerGroup, check: Callable[[WorkerGroup], None]) -> None:
    check(group)
    assert group.exchanged_bytes == 0


def test_rows_go_from_one_group_to_another(group: WorkerGroup) -> None:
    """Two runs in this process, with stores of their own."""
    with launch({"actor": ClassWithInitArgs(RowWorker)}, LaunchOptions(backend="local")) as run:
        actor = run.groups["actor"]
        whole, ref = sampled(group, "rows")
        ref.reorder(np.arange(16)[::-1])
        whole.reorder(np.arange(16)[::-1])
        copy = actor.receive(ref.select(["padded"], [], []), "actor")
        assert same_batch(actor.read(copy), whole.select(["padded"], [], []))
        values = actor.add_up.retain("wide")(actor.receive(ref.select(["tokens", "padded"], [], []), "actor"))
        home = group.receive(values.select(["wide"], [], []), group.exchange(ref, "actor"))
        assert same_batch(group.read(home), actor.read(values.select(["wide"], [], [])))
        moved = actor.exchange(home, "actor")
        assert same_batch(actor.read(moved), actor.read(values.select(["wide"], [], [])))
        assert group.stored_bytes() == [0]
        assert actor.exchange(moved, "actor") is moved and actor.receive(moved, moved) is moved
