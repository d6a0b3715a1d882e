"""Batches by reference in process: worker methods get DataProto and know nothing of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rlhub.single_controller import ClassWithInitArgs, WorkerGroup, launch
from rlhub.single_controller.resources import LaunchOptions
from tests.support.row_calls import check_joined, check_life, check_refusals
from tests.support.row_workers import RowWorker


@pytest.fixture
def group() -> Iterator[WorkerGroup]:
    with launch({"rollout": ClassWithInitArgs(RowWorker)}, LaunchOptions(backend="local")) as run:
        yield run.groups["rollout"]


@pytest.mark.parametrize("check", [check_life, check_joined, check_refusals])
def test_in_process(group: WorkerGroup, check: Callable[[WorkerGroup], None]) -> None:
    check(group)
    assert group.exchanged_bytes == 0
