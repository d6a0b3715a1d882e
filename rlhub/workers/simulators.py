"""Simulators in actors of their own pool: environments in lock-step whose calls go to other processes, also of other machines.

`SimulatorActor` is the object of each actor, an EnvManager.  `RemoteSimulators` is the rollout rank's side: the environments of
a stage over several actors, with one call to each for a chunk.  Pictures come in Ray's object store, from which the rank copies
them once.  A rank starts its actors itself, so they end with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlhub.engines.rollout.embodied import SubmittedEnv
from rlhub.envs.base import EnvError
from rlhub.envs.vector.base import ChunkResult, Obs, VectorSpec
from rlhub.envs.vector.lockstep import Buffers, Texts, result_of
from rlhub.envs.vector.manager import MAX_LOSSES, EnvManager, EnvManagerOptions
from rlhub.errors import DeadlineError, EngineError, WorkerDiedError
from rlhub.single_controller import AsyncActorOptions, ClassWithInitArgs, start_async_actor
from rlhub.single_controller.async_actor import AsyncActor
from rlhub.single_controller.resources import Backend
from rlhub.utils.children.process import LOAD_TIMEOUT_S

logger = logging.getLogger(__name__)
GRACE_S = 60.0
"""Time in seconds that an actor has beyond the limits of its own processes; one that is silent for longer is replaced."""
CLOSE_S = 10.0
LOST = (WorkerDiedError, DeadlineError)
"""The errors of a call whose actor has died or hangs."""


class SimulatorActor:
    """The object of an actor: an EnvManager, whose calls are executed in the order of their arrival."""

    def __init__(self, options: EnvManagerOptions) -> None:
        self._manager = EnvManager(options)

    async def spec(self) -> VectorSpec:
        """Starts the processes and returns the environment's spec."""
        return await asyncio.to_thread(lambda: self._manager.spec)

    async def reset(self, ids: list[int], seeds: list[int], initial: list[int] | None) -> Obs:
        """Begins episodes; see VectorEnv.reset."""
        return await asyncio.wrap_future(self._manager.submit_reset(ids, seeds=seeds, initial=initial))

    async def chunk(self, actions: NDArray[np.float32]) -> ChunkResult:
        """Executes a chunk; see VectorEnv.chunk_step."""
        return await asyncio.wrap_future(self._manager.submit_chunk(actions))

    async def close(self) -> None:
        """Ends the processes."""
        await asyncio.to_thread(self._manager.close)


@dataclass(slots=True, kw_only=True)
class _SimulatorPart:
    """The environments first..stop of one actor.  begun: its environments that have had a reset.  unreported: those whose
    episodes were lost while others were reset; the next chunk reports them."""

    first: int
    options: EnvManagerOptions
    place: AsyncActorOptions
    backend: Backend
    actor: AsyncActor | None = None
    begun: set[int] = field(default_factory=set)
    unreported: set[int] = field(default_factory=set)
    num_losses: int = 0

    @property
    def stop(self) -> int:
        return self.first + self.options.num_envs

    @property
    def limit_s(self) -> float:
        """Returns the time limit of a call in seconds, in which the manager may have replaced a process."""
        return self.options.timeout_s + 2 * max(self.options.start_timeout_s, LOAD_TIMEOUT_S) + GRACE_S

    def start(self) -> None:
        """Starts the actor."""
        self.actor = start_async_actor(ClassWithInitArgs(SimulatorActor, self.options), self.place, backend=self.backend)

    def begin(self, method: str, *arguments: Any) -> Callable[[], Any]:
        """Starts a call and returns what waits for its result.  The latter raises one of LOST where the actor has died."""
        assert self.actor is not None, "started first"
        try:
            return self.actor.address.begin(method, *arguments, deadline_s=self.limit_s)
        except WorkerDiedError as error:
            lost = error

        def fail() -> Any:
            raise lost

        return fail

    def replace(self, why: BaseException) -> None:
        """Starts another actor in place of one that died or hangs.  Raises EnvError when it fails again and again."""
        self.num_losses += 1
        reason = str(why).partition("\n")[0]
        if self.num_losses > MAX_LOSSES:
            raise EnvError(f"the simulators {self.place.name} failed {self.num_losses} times in a row: {reason}") from why
        logger.warning("the simulators %s are lost and started again: %s", self.place.name, reason)
        self.end()
        self.start()

    def end(self) -> None:
        """Ends the actor with everything that it started."""
        if self.actor is not None:
            self.actor.kill()


class RemoteSimulators(SubmittedEnv):
    """The environments of a stage, in one actor for each of `places`, with equal parts of them and of their processes.

    The actors start with the object.  One that dies, or is silent for longer than its limits, costs the episodes of its own
    environments: their rows are invalid and `lost`, and another actor takes its place within the same call.
    """

    def __init__(self, options: EnvManagerOptions, places: Sequence[AsyncActorOptions], *, backend: Backend = "ray") -> None:
        self.options, self.num_envs = options, options.num_envs
        if options.num_envs < len(places):
            raise EngineError(f"{options.num_envs} environments of a stage cannot be spread over {len(places)} actors")
        bounds = [options.num_envs * number // len(places) for number in range(len(places) + 1)]
        self._parts = []
        for place, first, stop in zip(places, bounds[:-1], bounds[1:], strict=True):
            processes = min(max(options.processes // len(places), 1), stop - first)
            own = dataclasses.replace(options, num_envs=stop - first, processes=processes)
            self._parts.append(_SimulatorPart(first=first, options=own, place=place, backend=backend))
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="simulators")
        self._spec = self._thread.submit(self._start)

    @property
    def spec(self) -> VectorSpec:
        """Returns the environment's spec; waits until the processes run.  Raises WorkerError where they cannot start."""
        return self._spec.result()

    def submit_reset(self, ids: Sequence[int], *, seeds: Sequence[int], initial: Sequence[int] | None) -> Future[Obs]:
        """Begins episodes without waiting; see VectorEnv.reset."""
        return self._thread.submit(self._reset, list(ids), list(seeds), None if initial is None else list(initial))

    def submit_chunk(self, actions: NDArray[np.float32]) -> Future[ChunkResult]:
        """Executes a chunk without waiting; see VectorEnv.chunk_step."""
        return self._thread.submit(self._chunk, actions)

    def close(self) -> None:
        """Ends the actors.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        started = [part for part in self._parts if part.actor is not None and not part.actor.ended]
        for wait in [part.actor.address.begin("close", deadline_s=CLOSE_S) for part in started if part.actor is not None]:
            with suppress(*LOST):
                wait()
        for part in self._parts:
            part.end()

    def _start(self) -> VectorSpec:
        with ThreadPoolExecutor(len(self._parts)) as pool:
            list(pool.map(_SimulatorPart.start, self._parts))
        specs: list[VectorSpec] = [wait() for wait in [part.begin("spec") for part in self._parts]]
        return specs[0]

    def _reset(self, ids: list[int], seeds: list[int], initial: list[int] | None) -> Obs:
        asked = {}
        for number, part in enumerate(self._parts):
            places = [place for place, row in enumerate(ids) if part.first <= row < part.stop]
            if places:
                own = [ids[place] - part.first for place in places]
                asked[number] = places, (own, [seeds[p] for p in places], initial and [initial[p] for p in places])
        waits = {number: self._parts[number].begin("reset", *arguments) for number, (_, arguments) in asked.items()}
        found: list[Obs] = []
        for number, wait in waits.items():
            part, arguments = self._parts[number], asked[number][1]
            try:
                found.append(wait())
            except LOST as error:
                self._replace(part, error)
                part.unreported, part.begun = part.begun - set(arguments[0]), set()
                found.append(part.begin("reset", *arguments)())
            part.begun |= set(arguments[0])
        order = np.argsort([place for places, _ in asked.values() for place in places], kind="stable")
        return joined(found, order)

    def _chunk(self, actions: NDArray[np.float32]) -> ChunkResult:
        waits = [
            None if part.unreported else part.begin("chunk", actions[part.first : part.stop]) for part in self._parts
        ]  # nothing is executed after a loss during a reset: these actions were chosen for episodes that are gone
        found = []
        for part, wait in zip(self._parts, waits, strict=True):
            if wait is None:
                found.append(self._lost(part, part.unreported, actions.shape[1], "lost while other environments were reset"))
                part.unreported = set()
                continue
            try:
                found.append(wait())
                part.num_losses = 0
            except LOST as error:
                self._replace(part, error)
                part.begun = set()
                found.append(self._lost(part, set(range(part.options.num_envs)), actions.shape[1], str(error)))
        return together(found)

    def _replace(self, part: _SimulatorPart, why: BaseException) -> None:
        if self._closed:
            raise why
        part.replace(why)
        part.begin("spec")()  # its processes run, or it raises why they cannot

    def _lost(self, part: _SimulatorPart, rows: set[int], chunk: int, why: str) -> ChunkResult:
        """Returns the result of a chunk in which nothing was executed and the episodes of these rows were lost."""
        size = part.options.num_envs
        info = [{"lost": why} if row in rows else {} for row in range(size)]
        texts = Texts(instruction=[""] * size, final_instruction=[], info=info, num_rendered=0)
        result = result_of(Buffers.new(self.spec, size, frames=False), chunk, texts)
        result.lost[sorted(rows)] = True
        return result


def joined(parts: Sequence[Obs], order: NDArray[np.int64] | None = None) -> Obs:
    """Returns the observations of several actors as one, in arrays of their own.  order: (rows,), of the rows one after the
    other; None leaves them so."""
    rows = slice(None) if order is None else order
    arrays: Mapping[str, np.ndarray] = {
        name: np.concatenate([getattr(part, name) for part in parts])[rows] for name in ("images", "state", "seed")
    }
    instruction = [text for part in parts for text in part.instruction]
    return Obs(**arrays, instruction=instruction if order is None else [instruction[row] for row in order])


def together(parts: Sequence[ChunkResult]) -> ChunkResult:
    """Returns the results of several actors, whose environments follow each other, as one, in arrays of their own."""
    names = ("reward", "terminated", "truncated", "valid", "success", "lost")
    arrays: Mapping[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return ChunkResult(
        obs=joined([part.obs for part in parts]),
        final_obs=joined([part.final_obs for part in parts]),
        **arrays,
        info=[info for part in parts for info in part.info],
        num_rendered=sum(part.num_rendered for part in parts),
    )
