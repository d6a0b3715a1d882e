"""Replicas that are nothing but coroutines, on an event loop whose time passes only when everybody waits: what happens to a fleet
in hours takes milliseconds, and is the same each time."""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rlhub.agents.remote.streaming import TokenStream, TokenStreams
from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, SamplingParams
from rlhub.errors import DeadlineError, EngineError, WorkerDiedError, WorkerError
from rlhub.rollout_service.server import ReplicaStatus, UpdateReport

FOREVER_S = 1e4
TICK_S = 1e-6  # a clock moves on whatever happens


class _Jumps(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Instead of waiting, moves the clock on."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("everybody waits, and for nothing")
        self.now += max(timeout, 0.0) + TICK_S
        return super().select(0)


class JumpingLoop(asyncio.SelectorEventLoop):
    """See the module docstring."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now


def play(scenario: Coroutine[Any, Any, None]) -> None:
    """Run it; what takes forever fails."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(asyncio.wait_for(scenario, FOREVER_S))


def token(seed: int, index: int) -> int:
    """Of a completion, whoever samples it."""
    return 3 + (seed * 31 + index * 7) % 97


class Actor:
    """An AsyncActor whose object is a rollout server without an engine.  pace_s: what anything takes, at most."""

    def __init__(self, name: str, rng: random.Random, pace_s: float = 1.0) -> None:
        self.name = name
        self.version = -1
        self.running: list[str] = []
        self.aborted: set[int] = set()
        self.failure = ""
        self.hangs = self.asleep = False
        self._rng, self._pace_s = rng, pace_s
        self._death = asyncio.Event()
        self._go = asyncio.Event()
        self._go.set()
        self._told_to_pause = False
        self._turn = asyncio.Lock()
        self._streams = TokenStreams()
        self._requests: dict[int, str] = {}
        self._keys = itertools.count()

    # -- the caller's side ---------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        return self._death.is_set()

    def kill(self) -> None:
        self._death.set()

    async def until_ended(self) -> None:
        await self._death.wait()

    async def call(self, method: str, *args: Any, deadline_s: float | None = None, **kw: Any) -> Any:
        if self.ended:
            raise self._died()
        work = asyncio.ensure_future(self._run(method, *args, **kw))
        dying = asyncio.ensure_future(self._death.wait())
        try:
            await asyncio.wait({work, dying}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if self.ended:
                raise self._died()
            if not work.done():
                raise DeadlineError(f"{self.name}.{method}", float(deadline_s or 0.0))
            return work.result()
        finally:
            if work.done() and not work.cancelled():
                work.exception()
            work.cancel()
            dying.cancel()

    def _died(self) -> WorkerDiedError:
        return WorkerDiedError("it was killed", role=self.name, rank=0)

    async def _run(self, method: str, *args: Any, **kw: Any) -> Any:
        self.running.append(method)
        try:
            if self.hangs:
                await asyncio.Event().wait()
            return await getattr(self, method)(*args, **kw)
        except EngineError as error:
            raise WorkerError(str(error), role=self.name, rank=0) from error
        finally:
            self.running.remove(method)

    async def _take_time(self) -> None:
        await asyncio.sleep(self._rng.random() * self._pace_s)

    # -- the server's --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._take_time()

    async def update_weights(self, folder: str, version: int) -> UpdateReport:
        async with self._turn:
            await self._take_time()
            self._go.clear()
            await self._take_time()
            self._refuse_failed()
            self.version, self.asleep = version, False
            if not self._told_to_pause:
                self._go.set()
        return UpdateReport(version=version, paused_at=0.0, pause_s=1.0, read_s=2.0, bytes=1, fingerprint=f"{version:016x}")

    async def sleep(self, keep_weights: bool) -> None:
        async with self._turn:
            assert not self._requests
            self.asleep = True
            await self._take_time()

    async def pause(self) -> None:
        async with self._turn:
            self._told_to_pause = True
            await self._take_time()
            self._go.clear()

    async def resume(self) -> None:
        async with self._turn:
            self._told_to_pause = False
            await self._take_time()
            self._go.set()

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted |= {key for key, name in self._requests.items() if name in request_ids}

    async def status(self) -> ReplicaStatus:
        await self._take_time()
        return ReplicaStatus(
            version=self.version,
            load=len(self._requests),
            paused=self._told_to_pause,
            num_requests=0,
            num_tokens=0,
            fingerprint="",
            failure=self.failure,
            pid=0,
            rss_gb=0.0,
        )

    async def shutdown(self) -> None:
        self.failure = "it was shut down"

    def _refuse_failed(self) -> None:
        if self.failure:
            raise EngineError(self.failure)

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: str = "") -> Completion:
        key = next(self._keys)
        assert not self.asleep
        self._requests[key] = request.request_id
        try:
            if not follow:
                return await self._sample(key, request, params, None)
            with self._streams.of(follow) as stream:
                return await self._sample(key, request, params, stream)
        finally:
            del self._requests[key]
            self.aborted.discard(key)

    async def _sample(
        self, key: int, request: GenerationRequest, params: SamplingParams, stream: TokenStream | None
    ) -> Completion:
        found = Completion(token_ids=[], log_probs=[], finish_reason="abort", versions=[])
        for index in range(request.start, params.max_new_tokens):
            await self._take_time()
            while not self._go.is_set() and key not in self.aborted:
                await asyncio.sleep(self._pace_s)
            self._refuse_failed()
            if key in self.aborted:
                return found
            last = index + 1 == params.max_new_tokens
            new = Progress(token_ids=[token(request.seed, index)], log_probs=[-1.0], versions=[self.version])
            new.finish_reason = "length" if last else None
            if stream is not None:
                stream.follow(new)
            found.token_ids += new.token_ids
            found.log_probs += new.log_probs
            found.versions += new.versions
        found.finish_reason = "length"
        return found

    async def progress(self, follow: str, have: int) -> Progress | None:
        return await self._streams.after(follow, have)


class Actors:
    """What starts them and remembers them.  before: awaited with the number of the start before each."""

    def __init__(self, seed: int = 0, before: Callable[[int], Awaitable[None]] | None = None, pace_s: float = 1.0) -> None:
        self.rng = random.Random(seed)
        self.attempts = 0
        self.started: list[Actor] = []
        self._before, self._pace_s = before, pace_s

    async def __call__(self, name: str) -> Actor:
        number, self.attempts = self.attempts, self.attempts + 1
        if self._before is not None:
            await self._before(number)
        actor = Actor(name, self.rng, self._pace_s)
        self.started.append(actor)
        return actor

    @property
    def alive(self) -> list[Actor]:
        return [actor for actor in self.started if not actor.ended]
