"""RemoteWorkflow: an episode whose own code runs in an episode actor, while the driver's event loop serves its requests.

To the executor it is a workflow like any other.  The driver chooses replicas and leases environments for the remote episode with
the engine it is given, so that routing, sessions, checkpoints of partial generations and cancellation work as for an episode on
the driver.  EpisodeActors is the pool of the actors; it lives on the same event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from rlhub.agents.remote.actor_pool import UNLIMITED, ActorPool, PooledActor, StartActor, own_error
from rlhub.agents.remote.environment_requests import RELEASE, EnvironmentRequest, EnvironmentRequestHandler
from rlhub.agents.remote.episode_actor import (
    CompletionRequest,
    EpisodeActor,
    EpisodeActorSettings,
    EpisodeEnded,
    EpisodeStart,
    PlaceRequest,
    RequestCancelled,
    WorkflowKey,
)
from rlhub.agents.remote.streaming import extend
from rlhub.agents.trajectory import Sampled, TrajectoryRef, rows_of
from rlhub.agents.workflows.base import (
    EpisodeData,
    EpisodeEngine,
    Generated,
    PlacingEngine,
    RemoteGeneration,
    RolloutWorkflow,
    WorkflowParts,
)
from rlhub.engines.rollout.base import Completion, FinishReason, Progress
from rlhub.errors import DeadlineError, EngineError, RlhubError, WorkerDiedError, WorkerError
from rlhub.single_controller import AsyncActorOptions, CallObserver, ClassWithInitArgs, astart_async_actor
from rlhub.single_controller.placement import is_one_machine, node_at
from rlhub.single_controller.resources import Backend
from rlhub.utils.aio.results import Reject

if TYPE_CHECKING:
    from rlhub.single_controller.async_actor import AsyncActor

RETRIES = 3
"""Maximum number of repetitions of an episode whose actor died, so that an episode which kills its actor does not use up all
actors."""
CANCEL_S = 60.0
"""Maximum wait for an actor to acknowledge a cancellation, which it does at once; an actor that does not hangs."""
_runs = itertools.count()


class RemoteWorkflow(RolloutWorkflow):
    """Runs each episode in an actor of the pool.

    parts: those of the driver, of which only `environments` is used.  key: the workflow that the actors build.
    keeps: the tokens stay in the actor, and episodes return a TrajectoryRef.  direct: the actors generate at the replicas, which
    takes a PlacingEngine; else all their tokens come through the engine.
    """

    def __init__(
        self, parts: WorkflowParts, key: WorkflowKey, pool: EpisodeActors, *, keeps: bool = False, direct: bool = False
    ) -> None:
        super().__init__(parts)
        self._key, self._pool, self._keeps, self._direct = key, pool, keeps, direct

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        """Runs the episode in the actor with the fewest episodes.  If that dies, the episode starts again in another one."""
        for attempt in itertools.count():
            member = await self._pool.choose()
            try:
                return await self._run_in(member, engine, data)
            except WorkerDiedError as error:
                if not member.actor.ended:  # the episode's own code raised it
                    raise
                self._pool.lost(member, error)
                if attempt >= RETRIES:
                    raise
                self._pool.counts["episodes_again"] += 1
        raise AssertionError("unreachable")

    async def _run_in(self, member: PooledActor, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        member.episodes += 1
        sent = self._pool.sent_to(member)
        run = EpisodeRun(sent, f"{data.session}/{next(_runs)}", engine, self.parts)
        try:
            async with sent.prompt(data, self._key) as prompt:
                start = (data.ordinal, data.sample, data.seed, data.partial, self._keeps, self._direct)
                result = await run.play(data.session, prompt, start)
            for row in () if result is None else rows_of(result):
                if isinstance(row, TrajectoryRef):
                    row.home = member.home
            return result
        except WorkerError as error:
            own = own_error(error)
            if own is error:
                raise
            raise own from error
        finally:
            member.episodes -= 1
            stopped = False
            try:
                await run.stop_requests()
                stopped = True
            finally:
                if not (run.over and stopped) and not member.actor.ended:
                    self._pool.background(self._cancel(member, run.session))

    async def _cancel(self, member: PooledActor, session: str) -> None:
        try:
            await member.actor.call("cancel", session, deadline_s=CANCEL_S)
        except (WorkerDiedError, DeadlineError) as error:
            self._pool.lost(member, error)


class SentOnce:
    """What an actor has been sent once for many episodes: prompts, and the addresses of replicas.

    background: runs a coroutine as a task.
    """

    def __init__(self, actor: AsyncActor, background: Callable[[Any], None]) -> None:
        self.actor, self._background = actor, background
        self._numbers = itertools.count()
        self._prompts: dict[tuple[WorkflowKey, int, int], _SentPrompt] = {}
        self._replicas: WeakKeyDictionary[AsyncActor, asyncio.Future[int]] = WeakKeyDictionary()

    @asynccontextmanager
    async def prompt(self, data: EpisodeData, key: WorkflowKey) -> AsyncIterator[int]:
        """Yields the number by which the actor knows the episode's prompt and workflow, while it has them."""
        place = key, id(data.prompt_ids), id(data.row)  # the samples of a prompt share them
        if (found := self._prompts.get(place)) is None:
            number = next(self._numbers)
            sending = self.actor.call("take_prompt", number, tuple(key), data.prompt_ids, data.row)
            found = self._prompts[place] = _SentPrompt(number, data, asyncio.ensure_future(sending))
        found.episodes += 1
        try:
            await asyncio.shield(found.sent)  # also for the prompt's other episodes
            yield found.number
        finally:
            found.episodes -= 1
            if not found.episodes:
                del self._prompts[place]
                self._background(self._forget(found.number))

    async def _forget(self, number: int) -> None:
        with suppress(WorkerError):
            await self.actor.call("forget_prompt", number)

    async def replica(self, replica: AsyncActor) -> int:
        """Returns the number by which the actor knows a replica."""
        if replica not in self._replicas:
            self._replicas[replica] = asyncio.ensure_future(self._introduce(next(self._numbers), replica))
        return await asyncio.shield(self._replicas[replica])

    async def _introduce(self, number: int, replica: AsyncActor) -> int:
        await self.actor.call("take_replica", number, replica.address)
        return number


@dataclass(slots=True)
class _SentPrompt:
    """A prompt on its way to an actor, or there.  data: keeps the objects by whose identity it is found."""

    number: int
    data: EpisodeData
    sent: asyncio.Future[Any]
    episodes: int = 0


class EpisodeRun:
    """One run of an episode in an actor.  over: True once nothing of it is left there."""

    def __init__(self, sent: SentOnce, session: str, engine: EpisodeEngine, parts: WorkflowParts) -> None:
        self.session = session
        self.over = False
        self._sent, self._actor, self._engine = sent, sent.actor, engine
        self._running: dict[int, asyncio.Task[None]] = {}
        self._environments = EnvironmentRequestHandler(parts.environments)

    async def play(self, routed: str, prompt: int, start: EpisodeStart) -> Sampled | None:
        """Starts the episode and serves its requests until it ends; returns its trajectory, or where the actor keeps the tokens
        its numbers.  routed: its session for sticky routing."""
        self._routed = routed
        message = await self._receive("begin", prompt, start)
        while True:
            match message:
                case TrajectoryRef() as kept:
                    return kept
                case EpisodeEnded(rejected=None, trajectory=trajectory):
                    return trajectory
                case EpisodeEnded(rejected=reason):
                    raise Reject(reason)
                case RequestCancelled(number=number):
                    if number in self._running:
                        self._running[number].cancel()
                case request:
                    task = asyncio.create_task(self._serve(request))
                    self._running[request.number] = task
                    task.add_done_callback(partial(self._forget, request.number))
            message = await self._receive("next_message")

    def _forget(self, number: int, task: asyncio.Task[None]) -> None:
        self._running.pop(number, None)

    async def stop_requests(self) -> None:
        """Cancels the requests of the episode that still run, and releases its environments."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._environments.release_all()

    async def _receive(self, method: str, *args: Any) -> Any:
        """Returns the message with which a call of the actor answers."""
        try:
            message: Any = await self._actor.call(method, self.session, *args)
        except WorkerError:
            self.over = True
            raise
        self.over = isinstance(message, EpisodeEnded | TrajectoryRef)
        return PlaceRequest(*message) if type(message) is tuple else message

    async def _serve(self, request: CompletionRequest | PlaceRequest | EnvironmentRequest) -> None:
        try:
            value: Any = None
            if isinstance(request, PlaceRequest):
                if await self._place(request) != "abort":
                    return
            elif isinstance(request, EnvironmentRequest):
                value = await self._environments.handle(request)
                if request.method == RELEASE:
                    return
            else:
                value = await self._generate(request)
            await self._actor.call("respond", self.session, request.number, value)
        except Exception as error:  # noqa: BLE001  the task's boundary: raised where the episode waits for the answer
            with suppress(WorkerDiedError):  # of the actor: `next` raises it too
                await self._actor.call("fail_request", self.session, request.number, _portable(error))

    async def _place(self, asked: PlaceRequest) -> FinishReason:
        """Lets the actor generate at replicas; returns why the completion ended.  The episode has it, unless it was aborted."""
        generation = RemoteGeneration(
            session=asked.session or self._routed,
            cost=asked.cost,
            send=partial(self._generate_at, asked.number),
            written=self._written,
        )
        return (await cast("PlacingEngine", self._engine).aplace(generation)).finish_reason

    async def _generate_at(self, number: int, replica: AsyncActor, request_id: str, deadline_s: float | None) -> Generated:
        try:
            place = await self._sent.replica(replica)
            found = await self._actor.call("generate_at", self.session, number, place, request_id, deadline_s)
        except WorkerError as error:  # the replica has nothing to do with it
            raise EngineError(f"the process of the episode could not generate: {error}") from error
        if isinstance(found, Exception):
            raise found
        return Generated(*found)

    async def _written(self) -> Completion | None:
        with suppress(WorkerError):  # then the episode starts again
            found: Completion | None = await self._actor.call("written", self.session)
            return found
        return None

    async def _generate(self, asked: CompletionRequest) -> Completion:
        if not asked.followed:
            return await self._engine.agenerate(asked.request, asked.params)
        progress: asyncio.Queue[Progress] = asyncio.Queue()
        sending = asyncio.create_task(self._send_progress(asked.number, progress))
        try:
            return await self._engine.agenerate(asked.request, asked.params, progress.put_nowait)
        finally:
            sending.cancel()

    async def _send_progress(self, number: int, queue: asyncio.Queue[Progress]) -> None:
        """Sends new tokens to the actor; each call carries all tokens that arrived during the one before."""
        with suppress(WorkerError):  # the answer's own call meets the same
            while True:
                progress = await queue.get()
                while not queue.empty():
                    extend(progress, queue.get_nowait())
                await self._actor.call("report_progress", self.session, number, progress)


def _portable(error: Exception) -> RlhubError:
    """Returns the error to raise in the actor.  A WorkerError is converted, because the driver would take it for a death of the
    actor."""
    if isinstance(error, RlhubError) and not isinstance(error, WorkerError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")


class EpisodeActors(ActorPool):
    """The pool of episode actors.  counts: also episodes_again, the number of episodes that were repeated in another actor."""

    kind = "episode actor"
    metric = "rollout/episode_host"
    prefix = "episodes"

    def __init__(self, start_actor: StartActor, num_actors: int, *, restarts: int = 3, shutdown_s: float = 60.0) -> None:
        super().__init__(start_actor, num_actors, restarts=restarts, shutdown_s=shutdown_s)
        self.on_lost: Callable[[str], None] = lambda home: None
        """Called with the home of each actor that is lost."""
        self._sent: WeakKeyDictionary[PooledActor, SentOnce] = WeakKeyDictionary()

    def sent_to(self, member: PooledActor) -> SentOnce:
        """Returns what this actor has been sent."""
        if member not in self._sent:
            self._sent[member] = SentOnce(member.actor, self.background)
        return self._sent[member]

    def at(self, home: str) -> PooledActor | None:
        """Returns the actor that is this process, if it lives."""
        return next((member for member in self.members if member.home == home), None)

    def lost(self, member: PooledActor, why: BaseException | str) -> None:
        known = member in self.members and not self._closed
        super().lost(member, why)
        if known:
            self.on_lost(member.home)

    def metrics(self) -> dict[str, float]:
        """Returns the numbers of deaths, restarts and repeated episodes since the start."""
        return super().metrics() | {f"{self.metric}_episodes_again": float(self.counts["episodes_again"])}


@dataclass(slots=True, kw_only=True)
class EpisodeActorOptions:
    """The settings with which a run's episode actors start; see AsyncActorOptions."""

    backend: Backend = "ray"
    start_s: float = 1800.0
    log_dir: str | None = None
    plugins: tuple[str, ...] = ()
    observers: Sequence[CallObserver] = ()


def episode_actor_starter(settings: EpisodeActorSettings, options: EpisodeActorOptions) -> StartActor:
    """Returns a function that starts actors on the driver's machine, which has the files that the settings name.  The actors use
    no GPU and reserve no CPU."""

    async def start(name: str) -> AsyncActor:
        own = AsyncActorOptions(
            name=name,
            num_cpus=0.0,
            log_dir=options.log_dir,
            plugins=options.plugins,
            max_concurrency=UNLIMITED,
            start_deadline_s=options.start_s,
            observers=options.observers,
            node_id=await asyncio.to_thread(_own_node) if options.backend == "ray" else "",
        )
        return await astart_async_actor(ClassWithInitArgs(EpisodeActor, settings), own, backend=options.backend)

    return start


def _own_node() -> str:
    """Returns Ray's node id of this machine, or "" if the cluster has no other machine."""
    from rlhub.single_controller.ray.nodes import own_address

    return "" if is_one_machine() else node_at(own_address())
