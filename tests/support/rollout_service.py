"""Replicas of the fake engine in this process, and weights for them in a folder."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.engines.rollout.continuous_batching import Stepper, TokenEvent
from rlhub.engines.rollout.fake import FakeEngine
from rlhub.engines.rollout.registry import ROLLOUT_ENGINES
from rlhub.rollout_service.server import RolloutServer
from rlhub.sharding_manager.files import WeightWriter
from rlhub.single_controller import AsyncActor, AsyncActorOptions, ClassWithInitArgs, astart_async_actor
from rlhub.workers.memory_handover import WorkerRuntime
from tests.support.plain_train_engine import PlainTrainEngine

LIMITED_FAKE = "limited_fake"
STEP_S = 0.002
RUNTIME = WorkerRuntime(device="cpu", seed=0, max_prompt_length=32, max_response_length=64, deadline_s=5.0)


@dataclass
class Pace:
    """How many tokens a request may get: what is in work then stays so, however slow whoever looks at it is."""

    limit: int | None = None
    furthest: int = 0
    """Tokens of the request that has most."""

    def set(self, limit: int | None) -> None:
        self.limit, self.furthest = limit, 0


PACE = Pace()
"""Of the engines in this process."""


class LimitedSteps:
    """A stepper that steps no further than the pace allows."""

    def __init__(self, inner: Stepper, pace: Pace) -> None:
        self.inner, self.pace = inner, pace
        self.given: dict[int, int] = {}

    def add(self, key: int, request: GenerationRequest, params: SamplingParams) -> None:
        self.given[key] = 0
        self.inner.add(key, request, params)

    def step(self) -> Sequence[TokenEvent]:
        if self.pace.limit is not None and max(self.given.values(), default=0) >= self.pace.limit:
            time.sleep(STEP_S)
            return []
        events = self.inner.step()
        for event in events:
            self.given[event.key] += 1
            self.pace.furthest = max(self.pace.furthest, self.given[event.key])
            if event.finish is not None:
                del self.given[event.key]
        return events

    def remove(self, keys: Collection[int]) -> None:
        for key in keys:
            self.given.pop(key, None)
        self.inner.remove(keys)

    def recompute(self) -> None:
        self.inner.recompute()


class LimitedFake(FakeEngine):
    """At the pace of this process."""

    def _make_stepper(self) -> Stepper:
        return LimitedSteps(super()._make_stepper(), PACE)


def fake_config(*, limited: bool = False) -> ActorRolloutRefConfig:
    """For a service without a model.  limited: its engines keep the pace."""
    if limited and LIMITED_FAKE not in ROLLOUT_ENGINES:
        ROLLOUT_ENGINES.register(LIMITED_FAKE)(LimitedFake)
    config = ActorRolloutRefConfig()
    config.rollout.name = LIMITED_FAKE if limited else "fake"
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
        return self.write_unchanged(version)

    def write_unchanged(self, version: int) -> str:
        """The weights as they are; their fingerprint."""
        return self._writer.write(version).fingerprint


def request(prompt: int = 5, *, session: str = "", seed: int = 1) -> GenerationRequest:
    return GenerationRequest(prompt_ids=[prompt, 3, 4], seed=seed, session=session)


def sampling(tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens)
