"""One replica: requests go on while weights are read, and stop for the copying alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhub.engines.rollout.base import GenerationRequest
from rlhub.engines.rollout.fake import FakeEngine
from rlhub.errors import EngineError, RequestError, WeightMismatchError, WorkerError
from rlhub.rollout_service.router import Router
from rlhub.rollout_service.server import RolloutServer
from rlhub.sharding_manager.reader import WeightReader
from tests.support.rollout_service import PACE, RUNTIME, Replicas, Weights, fake_config, request, sampling


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Weights]:
    yield Weights(tmp_path)
    PACE.set(None)


async def reach(tokens: int) -> None:
    """Until somebody has so many."""
    async with asyncio.timeout(60):
        while PACE.furthest < tokens:
            await asyncio.sleep(0.001)


async def started(weights: Weights, *, held: bool = False) -> RolloutServer:
    server = RolloutServer(fake_config(limited=held), RUNTIME)
    await server.start()
    weights.write(0)
    await server.update_weights(weights.folder, 0)
    return server


def test_it_serves_the_weights_of_the_folder(weights: Weights) -> None:
    async def scenario() -> None:
        server = await started(weights)
        sent = weights.write(1)
        report = await server.update_weights(weights.folder, 1)
        status = await server.status()
        assert (report.version, status.version) == (1, 1)
        assert report.fingerprint == status.fingerprint == sent
        assert 0 < report.pause_s <= report.read_s
        completion = await server.agenerate(request(), sampling())
        assert len(completion.token_ids) == 8 and completion.versions == [1] * 8
        status = await server.status()
        assert (status.num_requests, status.num_tokens, status.load, status.failure) == (1, 8, 0, "")
        await server.shutdown()
        await server.shutdown()

    asyncio.run(scenario())


def test_a_request_with_a_foreign_token_is_refused_and_the_replica_goes_on(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "vocab_size", 8)

    async def scenario() -> None:
        router = Router(Replicas())
        await router.add("rollout-0")
        weights.write(0)
        await router.update(weights.folder, 0)
        with pytest.raises(WorkerError, match="token id 4711 at place 0, outside the model's vocabulary of 8") as refused:
            await router.agenerate(GenerationRequest(prompt_ids=[4711], seed=0), sampling())
        assert isinstance(refused.value.__cause__, RequestError)
        assert len((await router.agenerate(request(), sampling())).token_ids) == 8
        assert (router.counts["retries"], router.fleet.counts["deaths"]) == (0, 0)
        await router.close()

    asyncio.run(scenario())


def test_requests_keep_their_tokens_over_an_update(weights: Weights) -> None:
    async def scenario() -> None:
        server = await started(weights, held=True)
        whole = await server.agenerate(request(), sampling(40))
        weights.write(1)
        PACE.set(10)
        running = asyncio.create_task(server.agenerate(request(), sampling(40)))
        await reach(10)
        await server.update_weights(weights.folder, 1)
        PACE.set(None)
        completion = await running
        assert completion.token_ids == whole.token_ids
        assert completion.versions == [0] * 10 + [1] * 30
        await server.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize("half", ["prepare", "place"])
def test_only_the_copying_holds_up_requests(weights: Weights, monkeypatch: pytest.MonkeyPatch, half: str) -> None:
    """While files are checked, tokens flow; while they are copied, none is sampled.  The event loop answers in both."""
    reached, go_on = threading.Event(), threading.Event()
    original = getattr(WeightReader, half)

    def slow(self: WeightReader, *args: Any) -> Any:
        reached.set()
        assert go_on.wait(60)
        return original(self, *args)

    async def scenario() -> None:
        server = await started(weights)
        weights.write(1)
        monkeypatch.setattr(WeightReader, half, slow)
        update = asyncio.create_task(server.update_weights(weights.folder, 1))
        assert await asyncio.to_thread(reached.wait, 60)
        since = time.perf_counter()
        running = asyncio.create_task(server.agenerate(request(), sampling()))
        done, _ = await asyncio.wait([running], timeout=60 if half == "prepare" else 0.05)
        assert bool(done) == (half == "prepare")
        assert (await server.status()).load == (0 if done else 1)
        held = time.perf_counter() - since
        go_on.set()
        report = await update
        assert (await running).versions == [0 if half == "prepare" else 1] * 8
        assert (report.pause_s if half == "place" else report.read_s - report.pause_s) > held
        await server.shutdown()

    asyncio.run(scenario())


def test_what_cannot_be_read_leaves_the_replica_as_it_was(weights: Weights) -> None:
    async def scenario() -> None:
        server = await started(weights)
        weights.write(1)
        file = next((Path(weights.folder) / "version-1").glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(WeightMismatchError, match="checksum"):
            await server.update_weights(weights.folder, 1)
        assert (await server.agenerate(request(), sampling())).versions == [0] * 8
        for version in (2, 3):
            weights.write(version)
        with pytest.raises(EngineError, match="version 1 of the weights is no longer in .*; the newest is 3"):
            await server.update_weights(weights.folder, 1)
        await server.shutdown()

    asyncio.run(scenario())


def test_an_explicit_pause_outlasts_an_update(weights: Weights) -> None:
    async def scenario() -> None:
        server = await started(weights)
        await server.pause()
        running = asyncio.create_task(server.agenerate(request(), sampling()))
        weights.write(1)
        await server.update_weights(weights.folder, 1)
        assert (await server.status()).paused and not (await asyncio.wait([running], timeout=0.02))[0]
        await server.resume()
        assert (await running).versions == [1] * 8
        await server.shutdown()

    asyncio.run(scenario())


def test_abort_ends_requests_with_what_they_have(weights: Weights) -> None:
    async def scenario() -> None:
        server = await started(weights, held=True)
        PACE.set(5)
        running = asyncio.create_task(server.agenerate(request(), sampling(60)))
        await reach(5)
        await server.abort()
        completion = await running
        assert completion.finish_reason == "abort" and 0 < len(completion.token_ids) < 60
        await server.shutdown()

    asyncio.run(scenario())


def test_a_wrong_request_is_no_failure_of_the_engine(weights: Weights) -> None:
    async def scenario() -> None:
        server = await started(weights)
        with pytest.raises(EngineError, match="max_new_tokens is 0"):
            await server.agenerate(request(), sampling(0))
        assert (await server.status()).failure == ""
        server.engine.shutdown()
        with pytest.raises(EngineError):
            await server.agenerate(request(), sampling())
        assert "EngineError" in (await server.status()).failure

    asyncio.run(scenario())


def test_before_start_it_says_so() -> None:
    async def scenario() -> None:
        server = RolloutServer(fake_config(), RUNTIME)
        assert (await server.status()).version == -1
        with pytest.raises(EngineError, match="start comes first"):
            await server.agenerate(request(), sampling())

    asyncio.run(scenario())


def test_weights_are_checked_while_tokens_flow(weights: Weights) -> None:
    """The figures of a report: the pause is a part of the whole, by the clock."""

    async def scenario() -> None:
        server = await started(weights)
        weights.write(1)
        before = time.time()
        report = await server.update_weights(weights.folder, 1)
        assert before <= report.paused_at <= report.paused_at + report.pause_s <= time.time()
        assert report.bytes == sum(p.nbytes for p in weights.engine.model.parameters())
        await server.shutdown()

    asyncio.run(scenario())
