"""Worker groups on real Ray: dispatch, colocation, futures, sharing of arguments, environment and logs."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rlhub.errors import ConfigError, DispatchError
from rlhub.protocol import DataProto, DataProtoFuture
from rlhub.single_controller import ClassWithInitArgs, LaunchOptions, ObservedCall, launch
from rlhub.single_controller.calls import Watch
from rlhub.single_controller.ray import (
    ProcessOptions,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    merge_resource_pool,
    split_resource_pool,
)
from rlhub.tracking.spans import CallTiming
from rlhub.utils.timing import PhaseTimer
from tests.integration.controller_workers import Probe, Second

RANKS = 4


@pytest.fixture(scope="module")
def fused(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayWorkerGroup]:
    """Two colocated roles on four ranks; Probe arranges them as two shards of two ranks."""
    pool = RayResourcePool([RANKS])
    options = ProcessOptions(
        log_dir=str(tmp_path_factory.mktemp("logs")), worker_env={"MINE": "yes"}, plugins=("json",), start_deadline_s=600
    )
    roles = {"actor": RayClassWithInitArgs(Probe, 10, tp=2), "critic": RayClassWithInitArgs(Second)}
    group = RayWorkerGroup(pool, create_colocated_worker_cls(roles), options=options)
    group.fuse({"actor", "critic"})
    yield group
    group.close()
    pool.release()


@pytest.fixture()
def actor(fused: RayWorkerGroup) -> Any:
    return fused.actor


def batch(rows: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)})


def test_dispatch_modes(actor: Any) -> None:
    assert actor.only_zero([1, 2, 3, 4]) == (0, [1, 2, 3, 4])
    assert actor.replicate([1, 2, 3, 4]) == [(rank, [1, 2, 3, 4]) for rank in range(RANKS)]
    assert actor.spread([5, 6, 7, 8], other="o") == [(rank, 5 + rank, "o") for rank in range(RANKS)]
    assert actor.spread_on_zero([1, 2, 3, 4]) == (0, [1, 2, 3, 4])
    assert actor.per_rank((1, 2, 3, 4)) == [11, 12, 13, 14]
    assert actor.count(batch(6)) == [2, 2, 1, 1]
    assert actor.slowly(1) == [1, 2, 3, 4]
    with pytest.raises(DispatchError, match="ONE_TO_ALL"):
        actor.spread([1, 2])
    with pytest.raises(DispatchError, match="inside the worker"):
        actor.direct()


@pytest.mark.parametrize("rows", [8, 6, 3])
def test_uneven_batches_keep_their_rows_and_order(actor: Any, rows: int) -> None:
    out = actor.double(batch(rows), scale=3)
    assert out.batch["x"].tolist() == [3 * x for x in range(rows)]
    assert out.batch["rank"].tolist() == sorted(out.batch["rank"].tolist())
    assert sum(sum(counts) for counts in out.meta_info["metrics"].values()) == rows


def test_functions_can_be_sent(actor: Any) -> None:
    offset = 100
    out = actor.apply(lambda part: DataProto.from_dict({"x": part.batch["x"] + offset}), batch(5))
    assert out.batch["x"].tolist() == [100, 101, 102, 103, 104]


def test_mesh_calls_give_both_ranks_of_a_shard_the_rows_and_collect_one(actor: Any) -> None:
    out = actor.on_mesh(batch=batch(5))
    assert out.batch["x"].tolist() == list(range(5))
    assert out.batch["rank"].tolist() == [0, 0, 0, 2, 2]
    with pytest.raises(DispatchError, match="'elsewhere'.*it knows: actor"):
        actor.on_unknown_mesh(batch(4))


def test_each_chunk_of_a_mesh_call_is_stored_once(actor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[int] = []
    put = ray.put

    def counting_put(value: Any) -> Any:
        stored.append(len(value))
        return put(value)

    monkeypatch.setattr("ray.put", counting_put)
    actor.on_mesh(batch(40_000))
    assert stored == [20_000, 20_000], "one object per shard, not per rank"
    actor.replicate(batch(50_000))
    assert stored[2:] == [50_000]
    actor.on_mesh(batch(10))
    assert len(stored) == 3, "small values travel in the call"


def test_futures_are_split_and_passed_on_without_the_driver_reading_them(
    fused: RayWorkerGroup, actor: Any, tmp_path: Path
) -> None:
    future = actor.double_later(batch(7), after=str(tmp_path / "go"))  # it would fail if this waited for its end
    assert isinstance(future, DataProtoFuture)
    (tmp_path / "go").touch()
    out = fused.critic.total(future)
    assert out.batch["total"].tolist() == [2 * x + 1 for x in range(7)]
    assert out.batch["second_rank"].tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert future.get().batch["x"].tolist() == [2 * x for x in range(7)]


def test_any_method_can_be_submitted(actor: Any) -> None:
    future = actor.per_rank.submit([1, 2, 3, 4])
    assert future.get() == [11, 12, 13, 14] and future.done()
    assert actor.execute_all_sync("unregistered", [1, 2, 3, 4]) == [[1, 2, 3, 4]] * RANKS
    assert actor.execute_rank_zero_sync("unregistered", "v") == "v"


def test_colocated_roles_share_their_processes(fused: RayWorkerGroup, actor: Any) -> None:
    assert fused.critic.pid() == [worker.pid for worker in actor.workers]
    assert len(set(fused.critic.pid())) == RANKS
    with pytest.raises(DispatchError, match="no role 'reward'"):
        fused.spawn({"reward"})


def test_environment_of_the_ranks(actor: Any) -> None:
    environments = actor.environment()
    assert [env["RANK"] for env in environments] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "1", "2", "3"]
    assert {env["WORLD_SIZE"] for env in environments} == {env["LOCAL_WORLD_SIZE"] for env in environments} == {"4"}
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments}) == 1
    assert {(env["MINE"], env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) for env in environments} == {("yes", "1", "")}
    assert actor.niceness() == [os.nice(0)] * RANKS, "as this process, not the 15 that Ray would add"
    assert actor.all_reduce() == [10.0] * RANKS


def test_plugins_are_imported_in_every_worker(actor: Any) -> None:
    assert actor.loaded("json") == [True] * RANKS
    assert actor.loaded("no_such_module") == [False] * RANKS


def test_output_goes_to_one_log_per_rank_and_not_to_the_console(actor: Any, capfd: pytest.CaptureFixture[str]) -> None:
    actor.say("halloo")
    text = Path(actor.workers[2].log).read_text()
    assert "logged halloo" in text and "printed halloo" in text and "native halloo" in text and "[rank 2 " in text
    assert Path(actor.workers[2].log).name == "actor+critic-rank2.log"
    assert "halloo" not in "".join(capfd.readouterr())


def test_a_worker_cannot_change_the_senders_batch(actor: Any) -> None:
    mine = batch(40_000)
    with pytest.raises(Exception, match="in place|read-only"):
        actor.write_in_place(mine)
    assert torch.equal(mine.batch["x"], torch.arange(40_000))


def test_observers_and_deadlines(fused: RayWorkerGroup) -> None:
    seen: list[tuple[str, float]] = []

    class Recorder:
        def on_start(self, call: ObservedCall) -> None: ...

        def on_end(self, call: ObservedCall, seconds: float, error: BaseException | None) -> None:
            seen.append((f"{call.role}.{call.method}", seconds))

        def on_transfer(self, call: ObservedCall, *, sent: int = 0, received: int = 0) -> None: ...

    actor = fused.spawn({"actor"})["actor"]
    actor.observers.append(Recorder())
    actor.sleep_on(0, 0.2)
    future = actor.double_later(batch(4), delay=0.2)
    assert len(seen) == 1
    future.get()
    assert [name for name, _ in seen] == ["actor.sleep_on", "actor.double_later"] and all(s >= 0.2 for _, s in seen)


def moved(parts: Sequence[DataProto]) -> tuple[int, int]:
    """Bytes of the heads and of the out-of-band buffers in which these batches travel, from real pickles."""
    buffers: list[pickle.PickleBuffer] = []
    heads = [pickle.dumps(part, protocol=5, buffer_callback=buffers.append) for part in parts]
    return sum(map(len, heads)), sum(buffer.raw().nbytes for buffer in buffers)


def check_traffic(timing: CallTiming, sent: Sequence[DataProto], received: Sequence[DataProto]) -> None:
    """Compares the counts since the last look with the batches that went out and came in."""
    found = timing.traffic()
    timing.reset_traffic()
    for name, parts in (("bytes_out", sent), ("bytes_in", received)):
        heads, buffers = moved(parts)
        assert buffers <= found[f"perf/driver_{name}"] <= buffers + heads, (name, found, heads, buffers)
        assert heads <= 700 * len(parts)


@pytest.mark.parametrize("rows", [40, 60_000])
def test_the_bytes_of_a_call_are_those_that_ray_moves(fused: RayWorkerGroup, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    actor, timing, data = fused.spawn({"actor"})["actor"], CallTiming(PhaseTimer()), batch(rows)
    actor.mesh("actor")
    actor.observers.append(timing)
    check_traffic(timing, data.chunk(4), actor.double(data).chunk(4))
    # Two ranks of a shard get one object where it is large, and each its own inside the call where it is small.
    check_traffic(timing, data.chunk(2) * (1 if rows > 4096 else 2), actor.on_mesh(data).chunk(2))
    future = actor.double_later(data)
    check_traffic(timing, data.chunk(4), [])
    out = actor.double(future)
    check_traffic(timing, [], out.chunk(4))
    assert future.num_rows() == rows
    check_traffic(timing, [], [])
    check_traffic(timing, [], future.get().chunk(4))
    with pytest.raises(AssertionError):  # the control: a call that is not counted
        monkeypatch.setattr(Watch, "receive", lambda self, values: None)
        check_traffic(timing, data.chunk(4), actor.double(data).chunk(4))


def test_worker_env_may_not_override_the_rank(ray_cluster: None) -> None:
    with pytest.raises(ConfigError, match="RANK"):
        RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Probe), options=ProcessOptions(worker_env={"RANK": "7"}))


def test_a_class_decorated_with_ray_remote_is_accepted() -> None:
    assert RayClassWithInitArgs(ray.remote(Probe)).cls is Probe


def test_logging_level_follows_the_driver(actor: Any) -> None:
    level = logging.getLogger().getEffectiveLevel()
    assert actor.execute_rank_zero_sync("root_log_level") == level


class TestPools:
    """These need the module's group to be gone, so they run after it, on pools of their own."""

    @pytest.fixture(autouse=True)
    def _ended(self, fused: RayWorkerGroup) -> None:
        fused.close()
        fused._processes.pool.release()

    def test_split_and_merged_pools_use_the_same_places(self) -> None:
        pool = RayResourcePool([1, 2], deadline_s=300)
        try:
            first, second = split_resource_pool(pool, [2, 1])
            assert first.process_on_nodes == [1, 1] and second.process_on_nodes == [1]
            both = merge_resource_pool(second, first)
            assert both.slots() == pool.slots()[2:] + pool.slots()[:2]
            with pytest.raises(ConfigError, match="add up"):
                split_resource_pool(pool, [2, 2])
        finally:
            pool.release()

    def test_detached_groups_can_be_attached_to(self) -> None:
        pool = RayResourcePool([2], detached=True, deadline_s=300)
        options = ProcessOptions(detached=True, start_deadline_s=600)
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Probe, 5), name_prefix="kept", options=options)
        attached = RayWorkerGroup.from_detached("kept", 2, RayClassWithInitArgs(Probe))
        assert attached.per_rank([1, 2]) == [6, 7]
        assert [worker.pid for worker in attached.workers] == [worker.pid for worker in group.workers]
        group.close()
        pool.release()

    def test_launch_on_a_cluster_that_runs_leaves_it_running(self, tmp_path: Path) -> None:
        with launch({"actor": ClassWithInitArgs(Probe, 1)}, LaunchOptions(ranks_per_node=2, log_dir=tmp_path)) as launched:
            assert launched.groups["actor"].per_rank([1, 2]) == [2, 3]
        assert ray.is_initialized() and (tmp_path / "actor-rank1.log").is_file()
