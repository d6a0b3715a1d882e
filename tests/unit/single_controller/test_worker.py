"""Workers know their place; pools are plain numbers that are checked."""

from __future__ import annotations

import os
import pickle

import pytest

from rlhub.errors import ConfigError, DataError, DispatchError, WorkerError
from rlhub.single_controller import ClassWithInitArgs, ResourcePool, Worker, WorkerContext, create_colocated_worker_cls
from rlhub.single_controller.invoke import RemoteError, describe_failure
from rlhub.single_controller.resources import check_mapping
from rlhub.single_controller.worker import MeshInfo, applied_env, check_worker_env


class Plain(Worker):
    def __init__(self, value: int, *, other: int = 0) -> None:
        """Does not call super().__init__: it need not."""
        self.value = (value, other, self.rank, self.world_size)


def test_context_is_there_during_construction() -> None:
    built = ClassWithInitArgs(Plain, 1, other=2).build(WorkerContext(rank=3, world_size=4))
    assert built.value == (1, 2, 3, 4)
    assert Plain(1).value == (1, 0, 0, 1), "bare construction is a group of one, also after another context was used"


def test_what_was_built_is_released_the_last_first_and_once() -> None:
    worker = Plain(1)
    released: list[str] = []
    for part in ("engine", "receiver"):
        worker.closing.callback(released.append, part)
    for _ in range(2):
        worker.close()
    assert released == ["receiver", "engine"]


def test_mesh_declarations_can_be_asked_for() -> None:
    worker = Plain(1)
    assert worker.query_mesh("actor") == ()
    worker._register_dispatch_collect_info("actor", dp_rank=0, is_collect=False)
    assert worker.query_mesh("actor") == MeshInfo(dp_rank=0, is_collect=False)
    assert worker.query_mesh("critic") == ("actor",)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES"])
def test_worker_env_may_not_override_the_rank(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        check_worker_env({name: "1", "MINE": "2"})
    check_worker_env({"MINE": "2"})


def test_applied_env_restores_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHUB_TEST_A", "old")
    with applied_env({"RLHUB_TEST_A": "new", "RLHUB_TEST_B": "new"}):
        assert os.environ["RLHUB_TEST_A"] == os.environ["RLHUB_TEST_B"] == "new"
    assert os.environ["RLHUB_TEST_A"] == "old" and "RLHUB_TEST_B" not in os.environ


def test_failures_cross_by_pickle_with_their_fields_and_cause() -> None:
    context = WorkerContext(role="actor", rank=2, node="10.0.0.1")
    failure = pickle.loads(pickle.dumps(describe_failure(DataError("row 3"), context, "load")))
    assert isinstance(failure, RemoteError) and isinstance(failure.cause, DataError)
    assert (failure.error.role, failure.error.rank, failure.error.node) == ("actor", 2, "10.0.0.1")
    assert failure.error.remote_type == "DataError" and "load raised DataError: row 3" in str(failure.error)


def test_an_original_that_does_not_pickle_is_left_out() -> None:
    error = DataError("bad")
    error.__dict__["handle"] = lambda: None
    failure = describe_failure(error, WorkerContext(), "load")
    assert failure.cause is None and pickle.loads(pickle.dumps(failure)).error.remote_type == "DataError"


def test_a_failure_that_came_from_another_worker_keeps_its_name() -> None:
    first = WorkerError("died", role="critic", rank=1)
    assert describe_failure(first, WorkerContext(role="actor"), "read").error is first


def test_pools_number_ranks_node_by_node() -> None:
    pool = ResourcePool([2, 3])
    assert pool.world_size == 5
    assert pool.local_ranks() == [0, 1, 0, 1, 2] and pool.local_world_sizes() == [2, 2, 3, 3, 3]
    assert (pool + ResourcePool([1], max_colocate_count=2)).process_on_nodes == [2, 3, 1]


@pytest.mark.parametrize("counts", [[], [0], [2, -1]])
def test_empty_nodes_are_refused(counts: list[int]) -> None:
    with pytest.raises(ConfigError, match="at least one process"):
        ResourcePool(counts)


def test_roles_must_map_to_pools_that_exist() -> None:
    with pytest.raises(ConfigError, match="'critic' is mapped to pool 'glbal'; did you mean 'global'"):
        check_mapping({"global": [1]}, {"actor": "global", "critic": "glbal"})


def test_colocating_nothing_is_an_error() -> None:
    with pytest.raises(DispatchError, match="no roles"):
        create_colocated_worker_cls({})
