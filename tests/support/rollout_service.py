"""Replicas of the fake engine in this process, and weights for them in a folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from rlhub.config.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.engines.rollout.fake import FakeEngine
from rlhub.engines.rollout.registry import ROLLOUT_ENGINES, RolloutSetup
from rlhub.sharding_manager.files import WeightWriter
from rlhub.single_controller import ClassWithInitArgs
from rlhub.single_controller.async_actor import AsyncActor, AsyncActorOptions, astart_async_actor
from rlhub.workers.rollout_server import RolloutServer
from rlhub.workers.runtime import WorkerRuntime
from tests.support.plain_train_engine import PlainTrainEngine

SLOW_FAKE = "slow_fake"
STEP_S = 0.004
RUNTIME = WorkerRuntime(device="cpu", seed=0, max_prompt_length=32, max_response_length=64, deadline_s=5.0)


def slow_fake(setup: RolloutSetup) -> FakeEngine:
    """A token takes STEP_S seconds."""
    return FakeEngine(setup, step_s=STEP_S)


def fake_config(*, slow: bool = False) -> ActorRolloutRefConfig:
    """For a service without a model."""
    if slow and SLOW_FAKE not in ROLLOUT_ENGINES:
        ROLLOUT_ENGINES.register(SLOW_FAKE)(slow_fake)
    config = ActorRolloutRefConfig()
    config.rollout.name = SLOW_FAKE if slow else "fake"
    return config


@dataclass
class Replicas:
    """What starts replicas in this process and remembers them."""

    config: ActorRolloutRefConfig = field(default_factory=fake_config)
    server: type = RolloutServer
    started: list[AsyncActor] = field(default_factory=list)

    async def __call__(self, name: str) -> AsyncActor:
        spec = ClassWithInitArgs(self.server, self.config, RUNTIME)
        actor = await astart_async_actor(spec, AsyncActorOptions(name=name, max_concurrency=1 << 20), backend="local")
        self.started.append(actor)
        return actor


class Weights:
    """A trainer's side of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.engine = PlainTrainEngine(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)))
        self._writer = WeightWriter(self.engine, folder, bucket_bytes=1 << 20)

    def write(self, version: int) -> str:
        """Changed weights; their fingerprint."""
        self.engine.perturb(version)
        return self._writer.write(version).fingerprint


def request(prompt: int = 5, *, session: str = "", seed: int = 1) -> GenerationRequest:
    return GenerationRequest(prompt_ids=[prompt, 3, 4], seed=seed, session=session)


def sampling(tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens)
