"""The folder through which a server of another job gets its weights, and the lock that gives it each version once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from aiohttp import web

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.config.sections.rollout import RemoteConfig, RolloutConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.engines.rollout.remote import server
from rlhub.engines.rollout.remote.engine import RemoteEngine
from rlhub.engines.rollout.remote.server import Staging, WeightsLock
from rlhub.errors import DeadlineError, EngineError, ResourceError
from rlhub.rollout_service.service import RolloutService, service_options
from rlhub.workers.memory_handover import WorkerRuntime

RELOADS = "/update_weights_from_disk"
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Servers:
    """Two, which say that they do what they are asked to.  go_on: what a reload waits for."""

    def __init__(self) -> None:
        self.reloads: list[tuple[int, str]] = []
        self.reloading, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()
        self.fail = False
        self.urls: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == RELOADS:
            folder = Path((await request.json())["model_path"])
            assert (folder / "model.safetensors").is_file()
            self.reloads.append((request.url.port or 0, folder.name))
            self.reloading.set()
            await self.go_on.wait()
            if self.fail:
                return web.Response(status=500)
        return web.json_response({})


@asynccontextmanager
async def servers() -> AsyncIterator[Servers]:
    found, app = Servers(), web.Application()
    app.router.add_route("*", "/{path:.*}", found.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    for _ in range(2):
        await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.urls = [f"http://127.0.0.1:{port}" for _, port in runner.addresses]
    try:
        yield found
    finally:
        found.go_on.set()
        await runner.cleanup()


async def engine(at: Servers, folder: Path, rank: int = 0) -> RemoteEngine:
    built = build_rollout_engine(
        RolloutSetup(
            config=RolloutConfig(name="remote", remote=RemoteConfig(urls=at.urls, server="sglang", weights_folder=str(folder))),
            model=ModelConfig(),
            device=torch.device("cpu"),
            seed=0,
            max_prompt_length=10,
            max_response_length=10,
            dp_rank=rank,
        )
    )
    assert isinstance(built, RemoteEngine)
    await asyncio.to_thread(built.initialize)
    return built


async def update(one: RemoteEngine, version: int, value: float | None = None) -> None:
    buckets = [[("w", torch.full((4, 3), float(version) if value is None else value))]]
    await asyncio.to_thread(one.update_weights, buckets, version)


async def test_a_version_is_written_and_loaded_once_for_each_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, loop = asyncio.Event(), asyncio.get_running_loop()

    def sleep(seconds: float) -> None:
        loop.call_soon_threadsafe(waits.set)
        time.sleep(seconds)

    monkeypatch.setattr(server, "time", type("Time", (), {"sleep": staticmethod(sleep), "monotonic": time.monotonic}))
    async with servers() as at:
        ranks = [await engine(at, tmp_path, rank) for rank in range(4)]  # 0 and 2 at the first server, 1 and 3 at the other
        at.go_on.clear()
        first = asyncio.create_task(update(ranks[0], 1))
        await at.reloading.wait()
        second = asyncio.create_task(update(ranks[2], 1))
        await waits.wait()
        assert [name for _, name in at.reloads] == ["policy-0-1"] and ranks[2].version == -1
        at.go_on.set()
        await asyncio.gather(first, second, update(ranks[1], 1), update(ranks[3], 1))
        assert sorted(name for _, name in at.reloads) == ["policy-0-1", "policy-1-1"]
        assert len({port for port, _ in at.reloads}) == 2
        await asyncio.gather(*(update(one, 2) for one in ranks))
        assert sorted(name for _, name in at.reloads[2:]) == ["policy-0-2", "policy-1-2"]
        assert [one.version for one in ranks] == [2] * 4
        for one in ranks:
            await asyncio.to_thread(one.shutdown)


async def test_only_what_was_brought_since_an_engine_came_is_believed(tmp_path: Path) -> None:
    async with servers() as at:
        old = await engine(at, tmp_path)
        await update(old, 1)
        fresh = [await engine(at, tmp_path), await engine(at, tmp_path)]  # as after the server was started anew
        for one in fresh:
            await update(one, 1)
        assert len(at.reloads) == 2
        await update(old, 1, value=9.0)
        assert len(at.reloads) == 3, "other weights under the same number"
        for one in (old, *fresh):
            await asyncio.to_thread(one.shutdown)


async def test_a_reload_that_fails_is_nobodys(tmp_path: Path) -> None:
    async with servers() as at:
        first, second = await engine(at, tmp_path), await engine(at, tmp_path)
        await update(first, 1)
        at.fail = True
        with pytest.raises(EngineError, match="500"):
            await update(first, 2)
        at.fail = False
        await update(second, 2)
        await update(first, 2)
        assert [name for _, name in at.reloads] == ["policy-0-1", "policy-0-2", "policy-0-2"]
        for one in (first, second):
            await asyncio.to_thread(one.shutdown)


def test_a_lock_that_is_not_given_back_is_not_waited_for_without_end(tmp_path: Path) -> None:
    late = WeightsLock(tmp_path, "policy-0", 0.0)
    with WeightsLock(tmp_path, "policy-0", 5.0).taken(), pytest.raises(DeadlineError, match="the lock of"), late.taken():
        raise AssertionError("two have it")


def test_a_service_has_one_replica_a_server(tmp_path: Path) -> None:
    """Two would end each other's requests in their pauses, and neither could keep a pinned version."""
    config = ActorRolloutRefConfig()
    config.rollout.name, config.rollout.remote.urls = "remote", ["http://a:1", "http://b:1", "http://a:1"]
    trainer = TrainerConfig(nnodes=2, n_gpus_per_node=4, backend="local")
    options = service_options(config, trainer, run_folder=tmp_path)
    assert options.counts == [2]
    config.rollout.name = "hf"
    assert service_options(config, trainer, run_folder=tmp_path).counts == [4, 4]
    config.rollout.name = "remote"
    runtime = WorkerRuntime(device="cpu", seed=0, max_prompt_length=8, max_response_length=8, deadline_s=5.0)
    service = RolloutService(config, runtime, options)
    try:
        with pytest.raises(ResourceError, match="servers for 2 replicas"):
            asyncio.run(service._start_replica("rollout-2"))
    finally:
        service.close()


def versions(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_resumed_run_keeps_what_it_writes_and_not_what_was_written_after_its_checkpoint(tmp_path: Path) -> None:
    staging = Staging(tmp_path, "policy-0", None)
    staging.take([[("weight", torch.ones(2))]])
    (tmp_path / "policy-1-9").mkdir()
    for version in range(6):
        staging.write(version)
    assert versions(tmp_path) == ["policy-0-4", "policy-0-5", "policy-1-9"]
    assert staging.write(2).is_dir()
    assert versions(tmp_path) == ["policy-0-2", "policy-1-9"]
    staging.write(3)
    assert versions(tmp_path) == ["policy-0-2", "policy-0-3", "policy-1-9"]
