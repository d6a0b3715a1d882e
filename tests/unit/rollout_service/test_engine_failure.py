"""An engine that can never generate again says so, and its replica is replaced before a request meets it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.engines.rollout.fake import FakeEngine
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm.async_engine import AsyncVLLMEngine
from rlhub.errors import EngineError
from rlhub.rollout_service import server as rollout_server
from rlhub.rollout_service.fleet import FleetLimits
from rlhub.rollout_service.router import Router
from tests.support.rollout_service import Replicas, Weights

LIMIT_S = 60.0


def setup(mode: str) -> RolloutSetup:
    return RolloutSetup(
        config=RolloutConfig(mode=mode),  # type: ignore[arg-type]
        model=ModelConfig(),
        device=torch.device("cpu"),
        seed=0,
        max_prompt_length=8,
        max_response_length=8,
        load_checkpoint=True,
    )


def test_a_step_that_failed_is_told() -> None:
    def broken(request: GenerationRequest, params: SamplingParams) -> list[int]:
        raise ValueError("no such kernel")

    async def scenario() -> None:
        engine = FakeEngine(setup("sync"), script=broken)
        assert engine.failure == ""
        with pytest.raises(EngineError, match="no such kernel"):
            await engine.agenerate(GenerationRequest(prompt_ids=[1], seed=0), SamplingParams(max_new_tokens=2))
        assert engine.failure == "ValueError: no such kernel"
        engine.shutdown()

    asyncio.run(scenario())


class Client:
    """vLLM's processes, as far as they are looked at here."""

    dead = False

    async def resume(self, *, recompute: bool) -> None:
        return


def vllm_engine() -> tuple[AsyncVLLMEngine, Client]:
    engine, client = AsyncVLLMEngine(setup("async")), Client()
    engine._client = client  # type: ignore[assignment]
    return engine, client


def test_processes_of_vllm_that_died_are_told() -> None:
    engine, client = vllm_engine()
    assert engine.failure == ""
    client.dead = True
    assert "engine core" in engine.failure
    engine.shutdown()
    assert engine.failure == "", "an engine that was shut down has not failed"


@pytest.mark.parametrize("what", ["resume", "abort"])
def test_requests_that_come_while_others_are_told_disturb_nothing(what: str) -> None:
    async def scenario() -> None:
        engine, _ = vllm_engine()

        class Go(asyncio.Event):
            def set(self) -> None:
                super().set()
                engine._enter(GenerationRequest(prompt_ids=[1], seed=0))  # as from another thread

        class Named(GenerationRequest):
            @property
            def request_id(self) -> str:  # type: ignore[override]
                engine._enter(GenerationRequest(prompt_ids=[1], seed=0))
                return "b"

            @request_id.setter
            def request_id(self, name: str) -> None: ...

        lives = [engine._enter(Named(prompt_ids=[1], seed=0)) for _ in range(2)]
        for live in lives:
            live.go = Go()
        if what == "resume":
            await engine._resume(False)
        else:
            engine._abort(["b"])
        assert all(live.go.is_set() for live in lives)

    asyncio.run(scenario())


def test_an_idle_replica_whose_engine_has_failed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[Any] = []

    class Mortal(FakeEngine):
        @property
        def failure(self) -> str:
            return "its core has died" if self in failed else ""

    engines: list[Mortal] = []

    def make(setup: RolloutSetup) -> Mortal:
        engines.append(Mortal(setup))
        return engines[-1]

    monkeypatch.setattr(rollout_server, "build_rollout_engine", make)

    async def scenario() -> None:
        weights, replicas = Weights(tmp_path), Replicas()
        router = Router(replicas, FleetLimits(ping_s=0.005))
        await router.add("rollout-0")
        weights.write(0)
        await router.update(weights.folder, 0)
        failed.append(engines[0])
        end = time.monotonic() + LIMIT_S
        while len(engines) < 2 or not router.fleet.serving():
            assert time.monotonic() < end, "it is not replaced"
            await asyncio.sleep(0.002)
        assert replicas.started[0].ended and router.counts["retries"] == 0
        await router.close()

    asyncio.run(scenario())
