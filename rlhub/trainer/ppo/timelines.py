"""Timelines of single episodes: when an episode waited, generated, ran its own code and was scored.

    queue     from its start to its first generation: it waited for a place, an environment or an application
    generate  a generation, with its tokens
    tool      its own code between generations: tools, environments, the agent or the application
    reward    the scoring of its group

They are measured around the workflow, so they are the same wherever the episode's code runs.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from rlhub.agents.trajectory import Sampled
from rlhub.agents.workflows.base import (
    EpisodeData,
    EpisodeEngine,
    Generated,
    PlacingEngine,
    RemoteGeneration,
    RolloutWorkflow,
)
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, SamplingParams
from rlhub.rollout_service.executor.episode_groups import Group
from rlhub.tracking.spans import EpisodeSpans, Span, Value, episode_lane

QUEUE, GENERATE, TOOL, REWARD = "queue", "generate", "tool", "reward"


@dataclass(slots=True)
class Timelines:
    """Measures the executor's episodes.  workflow_for, score: the executor's, which it calls through this."""

    workflow_for: Callable[[Mapping[str, Any]], RolloutWorkflow]
    score: Callable[[Group], Awaitable[None]]
    spans: EpisodeSpans
    _timed: dict[int, TimedWorkflow] = field(init=False, default_factory=dict)

    def workflow(self, row: Mapping[str, Any]) -> RolloutWorkflow:
        """Returns the workflow of a prompt, which is measured."""
        inner = self.workflow_for(row)
        if id(inner) not in self._timed:
            self._timed[id(inner)] = TimedWorkflow(inner, self.spans)
        return self._timed[id(inner)]

    async def on_group(self, group: Group) -> None:
        """Scores a group."""
        start = time.perf_counter()
        await self.score(group)
        for sample in range(len(group.results)):
            lane = episode_lane(group.ordinal, sample)
            self.spans.extend(Span(lane=lane, name=REWARD, start=start, end=time.perf_counter()))


class TimedWorkflow(RolloutWorkflow):
    """Runs another workflow's episodes, and records their spans."""

    def __init__(self, inner: RolloutWorkflow, spans: EpisodeSpans) -> None:
        self._inner, self._spans, self.keeps_time = inner, spans, inner.keeps_time

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        start, timed, args = time.perf_counter(), _TimedEngine(engine), dict[str, Value](seed=data.seed)
        try:
            return await self._inner.arun_episode(timed, data)
        except BaseException as error:
            args["failed"] = type(error).__name__
            raise
        finally:
            lane = episode_lane(data.ordinal, data.sample)
            self._spans.add(list(timed.timeline(lane, start, time.perf_counter(), args)))


@dataclass(slots=True)
class _TimedEngine:
    """An engine that remembers its generations: start, end and tokens."""

    engine: EpisodeEngine
    generations: list[tuple[float, float, int]] = field(default_factory=list)

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        start = time.perf_counter()
        more = () if follow is None else (follow,)
        made = await self.engine.agenerate(request, params, *more)
        self.generations.append((start, time.perf_counter(), len(made.token_ids)))
        return made

    async def aplace(self, generation: RemoteGeneration) -> Generated:
        start = time.perf_counter()
        made = await cast("PlacingEngine", self.engine).aplace(generation)
        self.generations.append((start, time.perf_counter(), made.num_tokens))
        return made

    def timeline(self, lane: str, start: float, end: float, args: Mapping[str, Value]) -> Iterator[Span]:
        """Yields the spans of an episode that ran from `start` to `end`."""
        busy = start
        for begun, ended, tokens in sorted(self.generations):
            if begun > busy:
                first = busy == start
                yield Span(lane=lane, name=QUEUE if first else TOOL, start=busy, end=begun, args=args if first else {})
            yield Span(lane=lane, name=GENERATE, start=begun, end=ended, args={"tokens": tokens})
            busy = max(busy, ended)
        if end > busy:
            yield Span(lane=lane, name=TOOL if self.generations else QUEUE, start=busy, end=end, args=args)
