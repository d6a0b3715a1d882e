"""A served engine that fails is built anew, and one that cannot be mended ends the server with the reason.

A server that is given weights of another model goes on with its own; one whose writing failed says that it waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlhub.agents.openai_server.errors import ApiError
from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams, WeightBucket
from rlhub.engines.rollout.fake import FakeEngine, hashed_script
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.errors import EngineError, RequestError, VersionError
from rlhub.protocol.weights.pieces import Piece, whole_piece
from rlhub.trainer import serve
from rlhub.trainer.serve import EngineAdministration, ServedEngine, ServeLimits

REQUEST = GenerationRequest(prompt_ids=[1], seed=0)
PARAMS = SamplingParams(max_new_tokens=4)
LIMIT_S = 60.0


class Built:
    """What was built.  breaks: how many more steps fail; refuses: how many more engines cannot be built."""

    def __init__(self) -> None:
        self.engines: list[FakeEngine] = []
        self.breaks = self.refuses = 0

    def __call__(self) -> FakeEngine:
        if self.refuses:
            self.refuses -= 1
            raise OSError("no memory")
        setup = RolloutSetup(
            config=RolloutConfig(mode="async"),
            model=ModelConfig(),
            device=torch.device("cpu"),
            seed=0,
            max_prompt_length=8,
            max_response_length=8,
            load_checkpoint=True,
        )
        self.engines.append(FakeEngine(setup, script=self.script, vocab_size=20))
        self.engines[-1].version = 0
        return self.engines[-1]

    def script(self, request: GenerationRequest, params: SamplingParams) -> list[int]:
        if self.breaks:
            self.breaks -= 1
            raise RuntimeError("no such kernel")
        return hashed_script(request, params)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HEALTH_CHECK_S", 0.01)


def served(built: Built, rebuilds: int = 2) -> ServedEngine:
    return ServedEngine(built, ServeLimits(recompute=True, bucket_bytes=1 << 20, rebuilds=rebuilds))


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not reached():
            await asyncio.sleep(0.002)


def test_a_broken_engine_is_built_anew_as_often_as_it_answers_in_between() -> None:
    async def scenario() -> None:
        built = Built()
        engine = served(built)
        watching = asyncio.create_task(engine.watch())
        for round_ in range(5):
            built.breaks = 1
            with pytest.raises(EngineError, match="no such kernel"):
                await engine.agenerate(REQUEST, PARAMS)
            await until(lambda: not engine.failure)
            assert len(built.engines) == round_ + 2
            found: Completion = await engine.agenerate(REQUEST, PARAMS)
            assert len(found.token_ids) == 4
        with pytest.raises(RequestError, match="token id 99"):
            await engine.agenerate(GenerationRequest(prompt_ids=[99], seed=0), PARAMS)
        assert engine.failure == "" and len(built.engines) == 6, "a wrong request breaks nothing"
        watching.cancel()
        engine.shutdown()

    asyncio.run(scenario())


def test_one_that_cannot_be_mended_ends_the_watch_with_the_reason() -> None:
    async def scenario() -> None:
        built = Built()
        engine = served(built, rebuilds=2)
        watching = asyncio.create_task(engine.watch())
        built.breaks = 1000
        async with asyncio.timeout(LIMIT_S):
            while not watching.done():
                with pytest.raises((EngineError, ApiError)):
                    await engine.agenerate(REQUEST, PARAMS)
                await asyncio.sleep(0.002)
        with pytest.raises(EngineError, match=r"built anew 2 times \(rollout.replica_restarts\): RuntimeError: no such kernel"):
            watching.result()
        assert len(built.engines) == 3 and "no such kernel" in engine.failure
        with pytest.raises(ApiError) as refused:
            await engine.agenerate(REQUEST, PARAMS)
        assert refused.value.status == 503
        engine.shutdown()

    asyncio.run(scenario())


@pytest.mark.parametrize("refuses", [1, 2])
def test_an_engine_that_cannot_be_built_is_tried_again(refuses: int) -> None:
    async def scenario() -> None:
        built = Built()
        engine = served(built, rebuilds=2)
        watching = asyncio.create_task(engine.watch())
        built.breaks, built.refuses = 1, refuses
        with pytest.raises(EngineError, match="no such kernel"):
            await engine.agenerate(REQUEST, PARAMS)
        if refuses == 1:
            await until(lambda: not engine.failure)
            assert len((await engine.agenerate(REQUEST, PARAMS)).token_ids) == 4
            watching.cancel()
        else:
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises(EngineError, match="built anew 2 times.*OSError: no memory"):
                    await watching
        engine.shutdown()

    asyncio.run(scenario())


def test_a_pause_outlives_the_engine_that_was_paused() -> None:
    async def scenario() -> None:
        built = Built()
        engine = served(built)
        built.breaks = 1
        with pytest.raises(EngineError, match="no such kernel"):
            await engine.agenerate(REQUEST, PARAMS)
        await engine.pause()  # which mends it first
        assert len(built.engines) == 2 and built.engines[1]._loop.paused
        waiting = asyncio.create_task(engine.agenerate(REQUEST, PARAMS))
        await until(lambda: built.engines[1].load == 1)
        await engine.resume(recompute=True)
        assert len((await waiting).token_ids) == 4
        engine.shutdown()

    asyncio.run(scenario())


def test_versions_that_are_not_newer_are_refused_and_nothing_is_read() -> None:
    async def scenario() -> None:
        engine = served(Built())
        with pytest.raises(VersionError, match="version 0 is not newer than version 0.*reset_version=true"):
            await engine.reload("/nowhere", 0, reset_version=False)
        with pytest.raises(RequestError, match="no weights in /nowhere.*nothing was changed"):
            await engine.reload("/nowhere", 0, reset_version=True)
        assert (await engine.status())["version"] == 0
        engine.shutdown()

    asyncio.run(scenario())


WEIGHTS = {"embed": torch.zeros(4, 2), "norm": torch.zeros(2)}


class WeightsEngine:
    """Holds weights and says what was done to it.  fails: raised when half of them are written."""

    def __init__(self) -> None:
        self.version, self.load, self.done, self.fails = 0, 0, list[str](), list[Exception]()

    def live_weights(self) -> Iterable[Piece]:
        return (whole_piece(name, tensor) for name, tensor in WEIGHTS.items())

    def pause(self) -> None:
        self.done.append("pause")

    def resume(self, *, recompute: bool) -> None:
        self.done.append("resume")

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        if self.fails:
            raise self.fails.pop()
        self.done += sorted(name for bucket in buckets for name, _ in bucket)
        self.version = version


@pytest.fixture
def engine() -> WeightsEngine:
    return WeightsEngine()


@pytest.fixture
def reload(engine: WeightsEngine, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    admin = EngineAdministration(engine, recompute=False, bucket_bytes=1 << 20)  # type: ignore[arg-type]

    def run(weights: dict[str, torch.Tensor], version: int = 3) -> dict[str, Any]:
        save_file(weights, tmp_path / "model.safetensors")
        admin.update_weights(tmp_path, version)
        return admin.status()

    run.status = admin.status  # type: ignore[attr-defined]
    return run


def test_weights_that_fit(engine: WeightsEngine, reload: Any) -> None:
    """A tied head that the folder names besides is passed over."""
    assert reload(WEIGHTS | {"lm_head.weight": torch.zeros(4, 2)}) == {"version": 3, "load": 0, "paused": False}
    assert engine.done == ["pause", "embed", "norm", "resume"]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (WEIGHTS | {"embed": torch.zeros(4, 3)}, r"embed has shape \(4, 3\), and \(4, 2\) in the engine"),
        (WEIGHTS | {"deeper": torch.zeros(1)}, "names the engine does not have: deeper"),
        ({"embed": WEIGHTS["embed"]}, "without 1 weights: norm"),
    ],
)
def test_another_models_weights_change_nothing(
    engine: WeightsEngine, reload: Any, weights: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises(EngineError, match=f"another model's, and nothing was changed: .*{said}"):
        reload(weights)
    assert engine.done == [] and reload.status() == {"version": 0, "load": 0, "paused": False}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_change_nothing(engine: WeightsEngine, reload: Any, value: float) -> None:
    with pytest.raises(EngineError, match="are not finite, and nothing was changed: norm"):
        reload(WEIGHTS | {"norm": torch.tensor([1.0, value])})
    assert engine.done == [] and reload.status() == {"version": 0, "load": 0, "paused": False}


def test_half_written_weights_are_not_served_and_whole_ones_end_that(engine: WeightsEngine, reload: Any) -> None:
    engine.fails.append(EngineError("the device is lost"))
    with pytest.raises(EngineError, match="the device is lost"):
        reload(WEIGHTS)
    assert engine.done == ["pause"] and reload.status()["paused"]
    assert not reload(WEIGHTS)["paused"]
    assert engine.done[-1] == "resume"
