"""RemoteWorkflow: an episode whose own code runs in an episode actor, while the driver's event loop serves its requests.

To the executor it is a workflow like any other.  The driver chooses replicas and leases environments for the remote episode with
the engine it is given, so that routing, sessions, checkpoints of partial generations and cancellation work as for an episode on
the driver.  EpisodeActors is the pool of the actors; it lives on the same event loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import Enum
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
    RequestCancelled,
    WorkflowKey,
)
from rlhub.agents.remote.episode_messages import (
    REASONS,
    TURNS,
    GeneratedReport,
    Orders,
    Placement,
    PlaceRequest,
    Reports,
    Start,
    unpack_ref,
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
from rlhub.engines.rollout.base import Completion, Progress
from rlhub.errors import DeadlineError, EngineError, RlhubError, WorkerDiedError, WorkerError, WorkflowError
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
REPORTS_S = 60.0
"""Maximum wait for reports, after which the driver asks again: an answer may have been lost."""
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
        link = self._pool.link(member)
        run = EpisodeRun(next(_runs), link, data, engine, self.parts)
        try:
            async with link.prompt(data, self._key, keeps=self._keeps, direct=self._direct) as prompt:
                result = await run.play(prompt)
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
                    self._pool.background(self._cancel(member, run.number))

    async def _cancel(self, member: PooledActor, run: int) -> None:
        try:
            await member.actor.call("cancel", run, deadline_s=CANCEL_S)
        except (WorkerDiedError, DeadlineError) as error:
            self._pool.lost(member, error)


class EpisodeLink:
    """The driver's connection to an episode actor, on which the messages of all its episodes travel together.

    Prompts and the addresses of replicas are sent once for many episodes.  background: runs a coroutine as a task.
    """

    def __init__(self, member: PooledActor, background: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self.actor, self.home, self._background = member.actor, member.home, background
        self._numbers = itertools.count()
        self._prompts: dict[tuple[Any, ...], _SentPrompt] = {}
        self._replicas: WeakKeyDictionary[AsyncActor, asyncio.Future[int]] = WeakKeyDictionary()
        self._runs: dict[int, EpisodeRun] = {}
        self._orders: Orders = [], [], []
        self._num_reports = 0
        self._sending = self._receiving = False

    @asynccontextmanager
    async def prompt(self, data: EpisodeData, key: WorkflowKey, *, keeps: bool, direct: bool) -> AsyncIterator[int]:
        """Yields the number by which the actor knows the episode's prompt and workflow, while it has them."""
        place = key, data.ordinal, id(data.prompt_ids), id(data.row), keeps, direct  # the samples of a prompt share these
        if (found := self._prompts.get(place)) is None:
            number = next(self._numbers)
            prompt = number, tuple(key), data.ordinal, data.prompt_ids, data.row, keeps, direct
            found = self._prompts[place] = _SentPrompt(
                number, data, asyncio.ensure_future(self.actor.call("take_prompt", *prompt))
            )
        found.episodes += 1
        try:
            await asyncio.shield(found.sent)  # also for the prompt's other episodes
            yield found.number
        finally:
            found.episodes -= 1
            if not found.episodes:
                del self._prompts[place]
                self._orders[2].append(found.number)
                self._send_soon()

    async def replica(self, replica: AsyncActor, deadline_s: float | None) -> int:
        """Returns the number by which the actor knows a replica.  deadline_s: the longest wait for a completion."""
        if replica not in self._replicas:
            self._replicas[replica] = asyncio.ensure_future(self._introduce(next(self._numbers), replica, deadline_s))
        return await asyncio.shield(self._replicas[replica])

    async def _introduce(self, number: int, replica: AsyncActor, deadline_s: float | None) -> int:
        await self.actor.call("take_replica", number, replica.address, deadline_s)
        return number

    def start(self, run: EpisodeRun, start: Start) -> None:
        """Starts an episode; its messages go to the run until `end`."""
        self._runs[run.number] = run
        self._orders[0].append(start)
        self._send_soon()
        if not self._receiving:
            self._receiving = True
            self._background(self._receive())

    def end(self, run: EpisodeRun) -> None:
        """Forgets a run."""
        self._runs.pop(run.number, None)

    def place(self, placement: Placement) -> None:
        """Gives a generation a replica."""
        self._orders[1].append(placement)
        self._send_soon()

    def _send_soon(self) -> None:
        if not self._sending:
            self._sending = True
            self._background(self._send())

    async def _send(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        orders, self._orders, self._sending = self._orders, ([], [], []), False
        try:
            await self.actor.call("deliver", orders)
        except RlhubError as error:
            started, placed, _ = orders
            self._fail({run for run, *_ in [*started, *placed]}, error)

    async def _receive(self) -> None:
        """Gives each run what the actor reports of it, as long as there are any."""
        end: RlhubError = WorkflowError("the episode actors were closed")
        try:
            while self._runs:
                with suppress(DeadlineError):
                    reports = Reports(*await self.actor.call("reports", self._num_reports, deadline_s=REPORTS_S))
                    self._num_reports = reports.number
                    self._give(reports)
        except Exception as error:  # noqa: BLE001  the task's boundary: every run gets the error
            end = error if isinstance(error, RlhubError) else WorkflowError(f"no reports from {self.home}: {error!r}")
        finally:
            self._receiving = False
            self._fail(set(self._runs), end)

    def _give(self, reports: Reports) -> None:
        for request in reports.placing:
            if request[0] in self._runs:
                self._runs[request[0]].take(request)
        for generated in reports.generated:
            if generated[0] in self._runs:
                self._runs[generated[0]].take_generated(generated)
        for number in reports.waiting:
            if number in self._runs:
                self._runs[number].take(FETCH)
        for packed in reports.kept:
            if (ended := self._runs.pop(packed[0], None)) is not None:
                ended.take(unpack_ref(packed, self.home))

    def _fail(self, numbers: Iterable[int], error: RlhubError) -> None:
        for number in numbers:
            if number in self._runs:
                self._runs[number].fail(error)


@dataclass(slots=True)
class _SentPrompt:
    """A prompt on its way to an actor, or there.  data: keeps the objects by whose identity it is found."""

    number: int
    data: EpisodeData
    sent: asyncio.Future[Any]
    episodes: int = 0


class Fetch(Enum):
    """Stands for a message that the driver fetches with `next_message`."""

    FETCH = 0


FETCH = Fetch.FETCH


class EpisodeRun:
    """One run of an episode in an actor.  number: its number there.  over: True once nothing of it is left there."""

    def __init__(self, number: int, link: EpisodeLink, data: EpisodeData, engine: EpisodeEngine, parts: WorkflowParts) -> None:
        self.number = number
        self.over = False
        self._link, self._actor, self._data, self._engine = link, link.actor, data, engine
        self._messages: asyncio.Queue[PlaceRequest | Fetch | TrajectoryRef | RlhubError] = asyncio.Queue()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._generating: dict[int, asyncio.Future[GeneratedReport]] = {}
        self._environments = EnvironmentRequestHandler(parts.environments)

    async def play(self, prompt: int) -> Sampled | None:
        """Starts the episode and serves its requests until it ends; returns its trajectory, or where the actor keeps the tokens
        its numbers."""
        partial = () if self._data.partial is None else (self._data.partial,)
        self._link.start(self, (self.number, prompt, self._data.sample, self._data.seed, *partial))
        while True:
            match await self._next():
                case TrajectoryRef() as kept:
                    return kept
                case EpisodeEnded(rejected=None, trajectory=trajectory):
                    return trajectory
                case EpisodeEnded(rejected=reason):
                    raise Reject(reason)
                case RequestCancelled(number=number):
                    if number in self._running:
                        self._running[number].cancel()
                case (_, number, cost, *session):
                    self._run(number, self._place(number, cost, session[0] if session else self._data.session))
                case request:
                    self._run(request.number, self._answer(request))

    def take(self, message: PlaceRequest | Fetch | TrajectoryRef) -> None:
        """Takes a message of the episode."""
        self._messages.put_nowait(message)

    def take_generated(self, report: GeneratedReport) -> None:
        """Takes the end of a generation."""
        waiting = self._generating.get(report[1])
        if waiting is not None and not waiting.done():
            waiting.set_result(report)

    def fail(self, error: RlhubError) -> None:
        """Ends the run, because its actor did."""
        self._messages.put_nowait(error)
        for waiting in self._generating.values():
            if not waiting.done():
                waiting.set_exception(error)

    def _run(self, number: int, serving: Coroutine[Any, Any, None]) -> None:
        task = self._running[number] = asyncio.create_task(self._serve(number, serving))
        task.add_done_callback(lambda _: self._running.pop(number, None))

    async def stop_requests(self) -> None:
        """Cancels the requests of the episode that still run, and releases its environments."""
        self._link.end(self)
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._environments.release_all()

    async def _next(self) -> Any:
        """Returns the next message, or raises the episode's error."""
        message: Any = await self._messages.get()
        try:
            if message is FETCH:
                message = await self._actor.call("next_message", self.number)
            elif isinstance(message, RlhubError):
                raise message
        except WorkerError:
            self.over = True
            raise
        self.over = isinstance(message, EpisodeEnded | TrajectoryRef)
        return message

    async def _serve(self, number: int, serving: Coroutine[Any, Any, None]) -> None:
        try:
            await serving
        except Exception as error:  # noqa: BLE001  the task's boundary: raised where the episode waits for the answer
            with suppress(WorkerDiedError):  # of the actor: the run's messages say it too
                await self._actor.call("fail_request", self.number, number, _portable(error))

    async def _answer(self, request: CompletionRequest | EnvironmentRequest) -> None:
        if isinstance(request, CompletionRequest):
            value: Any = await self._generate(request)
        else:
            value = await self._environments.handle(request)
            if request.method == RELEASE:
                return
        await self._actor.call("respond", self.number, request.number, value)

    async def _place(self, number: int, cost: int, session: str) -> None:
        """Lets the actor generate at replicas.  The episode has the completion then, unless that was aborted."""
        generation = RemoteGeneration(session=session, cost=cost, send=partial(self._generate_at, number), written=self._written)
        if (await cast("PlacingEngine", self._engine).aplace(generation)).finish_reason == "abort":
            await self._actor.call("respond", self.number, number, None)

    async def _generate_at(self, number: int, replica: AsyncActor, request_id: str, deadline_s: float | None) -> Generated:
        try:
            place = await self._link.replica(replica, deadline_s)
            waiting = self._generating[number] = asyncio.get_running_loop().create_future()
            name = () if request_id == self._data.session else (request_id,)
            self._link.place((self.number, number, place, *name))
            report = await waiting
        except WorkerError as error:  # the replica has nothing to do with it
            raise EngineError(f"the process of the episode could not generate: {error}") from error
        finally:
            self._generating.pop(number, None)
        _, _, found, *reason = report
        if isinstance(found, Exception):
            raise found
        return Generated(found, REASONS[reason[0]])

    async def _written(self) -> Completion | None:
        with suppress(WorkerError):  # then the episode starts again
            found: Completion | None = await self._actor.call("written", self.number)
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
                await self._actor.call("report_progress", self.number, number, progress)


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
        self._links: WeakKeyDictionary[PooledActor, EpisodeLink] = WeakKeyDictionary()

    def link(self, member: PooledActor) -> EpisodeLink:
        """Returns the connection to this actor."""
        if member not in self._links:
            self._links[member] = EpisodeLink(member, self.background)
        return self._links[member]

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
