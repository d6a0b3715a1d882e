"""The service as threads see it, with its replica in this process; and how it is laid out by a configuration."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlhub.config.sections.trainer import TrainerConfig
from rlhub.engines.rollout.base import Completion
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.errors import EngineError, ResourceError, WorkerError
from rlhub.rollout_service import server as rollout_server
from rlhub.rollout_service.elastic import ReplicaBounds
from rlhub.rollout_service.service import RolloutService, ServiceOptions, service_options
from rlhub.single_controller import AsyncActorOptions, WorkerContext
from rlhub.single_controller.placement import DevicePlace, ReplicaPlaces, device_place
from rlhub.single_controller.ray.pool import RayResourcePool
from rlhub.workers.generation import rollout_setup
from tests.support.rollout_service import PACE, RUNTIME, Weights, fake_config, request, sampling

LIMIT_S = 60.0
"""Nothing here takes so long, unless it hangs."""


def submit(service: RolloutService, tokens: int = 8) -> Future[Completion]:
    return asyncio.run_coroutine_threadsafe(service.router.agenerate(request(), sampling(tokens)), service.loop)


def local(tmp_path: Path, *, held: bool = False, **options: object) -> RolloutService:
    config = fake_config(limited=held)
    return RolloutService(config, RUNTIME, ServiceOptions(backend="local", run_folder=tmp_path, **options))  # type: ignore[arg-type]


def test_it_publishes_and_generates_for_threads(tmp_path: Path) -> None:
    with local(tmp_path) as service:
        service.start()
        weights = Weights(service.folder)
        waiting = submit(service)
        weights.write(3)
        ((name, report),) = service.publish(str(service.folder), 3)
        assert (name, report.version) == ("rollout-0", 3)
        assert waiting.result(LIMIT_S).versions == [3] * 8, "it waited for weights"
        metrics = service.metrics()
        assert metrics["rollout/requests"] == 1 and metrics["rollout/tokens"] == 8 and metrics["rollout/replicas"] == 1
        assert service.add() == "rollout-1"
        service.remove("rollout-0")
        service.restart("rollout-1")
        assert service.add() == "rollout-0"
        folder = service.folder
    assert not folder.exists()


def test_each_replica_has_a_number_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By it replicas of a remote engine choose their server and name their folder of weights."""
    numbers: list[int] = []

    def noting(*arguments: Any, dp_rank: int = 0, **rest: Any) -> RolloutSetup:
        numbers.append(dp_rank)
        return rollout_setup(*arguments, dp_rank=dp_rank, **rest)

    monkeypatch.setattr(rollout_server, "rollout_setup", noting)
    with local(tmp_path) as service:
        service.start()
        Weights(service.folder).write(0)
        service.publish(str(service.folder), 0)
        service.add()
        service.restart("rollout-1")
    assert numbers == [0, 1, 1]


def test_pause_holds_up_everybody(tmp_path: Path) -> None:
    with local(tmp_path) as service:
        service.start()
        Weights(service.folder).write(0)
        service.publish(str(service.folder), 0)
        service.pause()
        waiting = submit(service)
        with pytest.raises(TimeoutError):
            waiting.result(0.03)
        service.resume()
        waiting.result(LIMIT_S)


def test_closing_ends_waiting_requests_and_may_be_repeated(tmp_path: Path) -> None:
    service = local(tmp_path, held=True)
    service.start()
    Weights(service.folder).write(0)
    service.publish(str(service.folder), 0)
    PACE.set(2)
    try:
        waiting = submit(service, 60)
        service.close()
        service.close()
        with pytest.raises(EngineError, match="was closed"):
            waiting.result(LIMIT_S)
    finally:
        PACE.set(None)


def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    config = fake_config()
    config.rollout.name = "vllm_async"
    service = RolloutService(config, RUNTIME, ServiceOptions(backend="local", run_folder=tmp_path))
    with pytest.raises(WorkerError, match="set rollout.mode=async") as caught:
        service.start()
    assert isinstance(caught.value.__cause__, EngineError) and not service.folder.exists()


def test_replicas_with_the_models_own_weights_serve_at_once(tmp_path: Path) -> None:
    with local(tmp_path, own_weights=True) as service:
        service.start()
        assert len(submit(service).result(LIMIT_S).token_ids) == 8
        Weights(service.folder).write(0)
        service.publish(str(service.folder), 0)
        assert submit(service).result(LIMIT_S).versions == [0] * 8


def trainer(**settings: object) -> TrainerConfig:
    return TrainerConfig(device="cpu", n_gpus_per_node=2, **settings)  # type: ignore[arg-type]


def test_one_replica_a_rank_of_the_rollouts_pool(tmp_path: Path) -> None:
    config = fake_config()
    config.rollout.replica_restarts = 7
    assert service_options(config, trainer(), run_folder=tmp_path).counts == [2]
    pools = {"pools": {"generation": {"nnodes": 2, "n_gpus_per_node": 3}}, "placement": {"rollout": "generation"}}
    options = service_options(config, trainer(**pools), run_folder=tmp_path)
    assert options.counts == [3, 3] and options.num_replicas == 6
    assert options.limits.restarts == 7 and options.limits.update_s == trainer().deadline_s.sync
    config.rollout.tensor_model_parallel_size = 3
    assert service_options(config, trainer(**pools), run_folder=tmp_path).counts == [1, 1]


def test_bounds_of_the_number_of_replicas(tmp_path: Path) -> None:
    config = fake_config()
    fixed = service_options(config, trainer(), run_folder=tmp_path)
    assert (fixed.bounds, fixed.num_replicas) == (ReplicaBounds(least=1, most=2), 2), "calls may remove one and add it again"
    config.rollout.min_replicas = 1
    elastic = service_options(config, trainer(), run_folder=tmp_path)
    assert (elastic.bounds, elastic.num_replicas) == (ReplicaBounds(least=1, most=2, by_queue=True), 1)
    config.rollout.min_replicas, config.rollout.max_replicas = None, 1
    assert service_options(config, trainer(), run_folder=tmp_path).bounds == ReplicaBounds(least=1, most=1, by_queue=True)


class Pool:
    """Records what is reserved."""

    def __init__(self, counts: list[int], reserved: list[Pool], amounts: dict[str, float]) -> None:
        self.counts, self.amounts, self._reserved = counts, amounts, reserved
        reserved.append(self)

    def slots(self) -> list[str]:
        return [f"slot of {self.counts}"] * sum(self.counts)

    def release(self) -> None:
        self._reserved.remove(self)


def test_replicas_that_come_and_go_reserve_gpus_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[Pool] = []
    monkeypatch.setattr(
        "rlhub.single_controller.ray.pool.RayResourcePool",
        lambda counts, amounts, **options: Pool(list(counts), reserved, amounts),
    )
    places = ReplicaPlaces(device="cuda", counts=[2, 2], devices_each=2, one_by_one=True)
    places.reserve()
    assert reserved == [], "none at once"
    for number in (0, 3, 3):  # the third is a restart, which takes its place again
        options = places.options(number, AsyncActorOptions(name=f"rollout-{number}", device="cuda"))
        assert (options.num_gpus, options.slot) == (2.0, "slot of [1]")
    assert [pool.amounts for pool in reserved] == [{"CPU": 1.0, "GPU": 2.0}] * 2
    with pytest.raises(ResourceError, match="GPUs for 4 replicas"):
        places.options(4, AsyncActorOptions(name="rollout-4", device="cuda"))
    places.free(3)
    places.free(3)
    assert len(reserved) == 1
    places.release()
    assert reserved == []


def test_a_rank_says_where_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    there = WorkerContext(local_rank=1, node="10.0.0.1", device="cuda")
    assert device_place(there) == DevicePlace(node="10.0.0.1", device="6")
    assert device_place(WorkerContext()).device == ""


def test_replicas_beside_the_actor_share_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhub.single_controller.placement.node_at", lambda address: f"node of {address}")
    places = ReplicaPlaces(
        device="cuda", counts=[2], actor_ranks=[DevicePlace(node="a", device="4"), DevicePlace(node="a", device="6")]
    )
    places.reserve()
    options = places.options(1, AsyncActorOptions(name="rollout-1", device="cuda"))
    assert (options.devices, options.node_id, options.num_gpus, options.num_cpus) == ("6", "node of a", 0.0, 0.0)
    with pytest.raises(ResourceError, match="GPUs for 2 replicas"):
        places.options(2, AsyncActorOptions(name="rollout-2", device="cuda"))


def test_a_tensor_parallel_replica_has_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhub.single_controller.placement.node_at", lambda address: f"node of {address}")
    ranks = [DevicePlace(node=node, device=device) for node in ("a", "b") for device in ("4", "6")]
    places = ReplicaPlaces(device="cuda", counts=[1, 1], actor_ranks=ranks, devices_each=2)
    options = places.options(1, AsyncActorOptions(name="rollout-1", device="cuda"))
    assert (options.devices, options.node_id) == ("4,6", "node of b")
    with pytest.raises(ResourceError, match="GPUs for 2 replicas"):
        places.options(2, AsyncActorOptions(name="rollout-2", device="cuda"))
    pool = RayResourcePool([1], use_gpu=True, amounts={"CPU": 1.0, "GPU": 2.0})
    assert pool.bundle() == {"CPU": 1.0, "GPU": 2.0}
