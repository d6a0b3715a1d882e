"""Saves the tokens of unfinished generations, so that a resumed run continues each response where it stopped.

The tokens of a running generation live in its engine.  For a checkpoint the executor aborts all running generations: each returns
the tokens that it has sampled, TrackedEngine records them and sends the request again from that position.  The episode sees one
completion.  The tokens of an episode that generates from another process stay there, and come for the checkpoint alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any, cast

from rlhub.agents.trajectory import Sampled
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, Generated, PlacingEngine, RemoteGeneration
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, Progress, SamplingParams

Interrupt = Callable[[Sequence[str]], Awaitable[None]]
"""`await interrupt(request_ids)` aborts these generations; each returns its tokens with the finish reason "abort"."""
COLLECT_S = 10.0
"""Time limit in seconds for the running generations to return the tokens that they have sampled."""


def join(before: Completion | None, after: Completion) -> Completion:
    """Returns one completion from two parts; `before` is None for the first part."""
    if before is None:
        return after
    made = before.between(0)
    made.extend(after)
    made.finish_reason = after.finish_reason
    return made


class Attempt:
    """Forwards the tokens of one attempt to the follower of a completion that may take several attempts, and counts them."""

    def __init__(self, follow: Follow) -> None:
        self._follow, self._num_sent = follow, 0

    def __call__(self, progress: Progress) -> None:
        self._num_sent += len(progress.token_ids)
        self._follow(progress)

    def send_rest(self, part: Completion) -> None:
        """Forwards the tokens of the attempt that its engine has not streamed, before the next attempt streams any."""
        if len(part.token_ids) > self._num_sent:
            rest = Progress(token_ids=[], log_probs=[])
            rest.extend(part.between(self._num_sent))
            self._follow(rest)


class TrackedEngine:
    """Wraps the engine of one episode, and records in `written` what its first generation has sampled so far."""

    def __init__(self, engine: EpisodeEngine, data: EpisodeData) -> None:
        self._engine, self._data = engine, data
        # A first generation that is complete is not requested again: the next request is the second generation.
        self._first = data.partial is None or data.partial.finish_reason == "abort"
        self._running: dict[asyncio.Future[None], str] = {}
        self._awaited: set[asyncio.Future[None]] = set()
        self._read: Callable[[], Awaitable[Completion | None]] | None = None
        self.written = data.partial

    def request_ids(self) -> list[str]:
        """Returns the requests of the generations that run now; `settled` waits for exactly these."""
        self._awaited |= self._running.keys()
        return list(self._running.values())

    async def settled(self) -> None:
        """Waits until those generations have ended or were interrupted, and reads what another process has written."""
        if self._awaited:
            await asyncio.wait(set(self._awaited))
        if self._read is not None:
            self.written = await self._read()

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """Generates one completion, as EpisodeEngine does; a generation that was interrupted for a checkpoint continues from its
        tokens."""
        first, self._first = self._first, False
        before = self._data.partial if first and request.start else None
        request = replace(request, request_id=request.request_id or self._data.session)
        written: Completion | None = None
        while True:
            part, interrupted = await self._generate(request, params, follow and Attempt(follow))
            written = join(written, part)
            if first:
                self.written = join(before, written)
            if part.finish_reason != "abort" or not interrupted:
                return written
            request = replace(
                request, prompt_ids=[*request.prompt_ids, *part.token_ids], start=request.start + len(part.token_ids)
            )

    async def _generate(
        self, request: GenerationRequest, params: SamplingParams, attempt: Attempt | None
    ) -> tuple[Completion, bool]:
        """Returns a completion, and whether `request_ids` had listed it for an interruption."""
        with self._tracked(request.request_id) as interrupted:
            if attempt is None:
                part = await self._engine.agenerate(request, params)
            else:
                part = await self._engine.agenerate(request, params, attempt)
                attempt.send_rest(part)
            return part, interrupted()

    async def aplace(self, generation: RemoteGeneration) -> Generated:
        """Lets another process generate; its generation, too, continues after an interruption for a checkpoint."""
        self._read = generation.written
        generation = replace(generation, request_id=generation.request_id or self._data.session)
        while True:
            with self._tracked(generation.request_id) as interrupted:
                part = await cast("PlacingEngine", self._engine).aplace(generation)
                if part.finish_reason != "abort" or not interrupted():
                    return part

    @contextmanager
    def _tracked(self, request_id: str) -> Iterator[Callable[[], bool]]:
        """Notes a generation while it runs; yields whether `request_ids` has listed it for an interruption."""
        end = asyncio.get_running_loop().create_future()
        self._running[end] = request_id
        try:
            yield lambda: end in self._awaited
        finally:
            del self._running[end]
            self._awaited.discard(end)
            end.set_result(None)


async def collect(engines: Sequence[TrackedEngine], interrupt: Interrupt) -> None:
    """Makes the running generations of these episodes record their tokens; one that does not in time starts again after a
    resume."""
    request_ids = [request_id for engine in engines for request_id in engine.request_ids()]

    async def written() -> None:
        if request_ids:
            await interrupt(request_ids)
        await asyncio.gather(*(engine.settled() for engine in engines))

    with suppress(TimeoutError):
        await asyncio.wait_for(written(), COLLECT_S)


def completion_of(state: Mapping[str, Any] | None) -> Completion | None:
    """Returns the completion of a JSON mapping; the inverse of `dataclasses.asdict`."""
    return None if state is None else Completion(**state)


def sample_state(trajectory: Sampled | None, written: Completion | None) -> dict[str, Any]:
    """Returns the JSON-able state of one sample of an unfinished group: its trajectory, or the tokens written so far, or
    neither."""
    return {
        "trajectory": None if trajectory is None else asdict(trajectory),
        "written": None if written is None else asdict(written),
    }
