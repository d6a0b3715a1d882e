"""EpisodeActor, the object of an AsyncActor: runs the episodes' own code (tools, tokenizing, environments) in its process.

For a generation the driver only chooses the replica: this process sends it the request and gets the tokens.  The reward function
scores turns and finished episodes here.  So neither tokens nor texts pass through the driver, but those that are followed while
they are sampled.  The numbers that remain travel together with those of other episodes (`deliver`, `reports`); the driver fetches
other requests of an episode with `next_message` and sends each response with `respond`, until which the episode waits.  An
episode may have several open requests.  Environment actors stay with the driver.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhub.agents.partials import join
from rlhub.agents.remote.environment_requests import DriverEnvironmentSource, EnvironmentRequest
from rlhub.agents.remote.episode_messages import Orders, PlaceRequest, ReportBox, Start, pack_ref
from rlhub.agents.remote.trajectory_store import TrajectoryStore
from rlhub.agents.trajectory import Episode, Sampled, Trajectory, TrajectoryRef
from rlhub.agents.workflows.base import EpisodeData, RolloutWorkflow, WorkflowParts, build_workflow
from rlhub.engines.rollout.base import FINISH_CODES, Completion, Follow, GenerationRequest, Progress, SamplingParams
from rlhub.errors import EngineError, RlhubError, WorkflowError
from rlhub.rewards.pool import RewardFunction
from rlhub.rewards.rows import RowScorer, no_turn_scores, pack_outcomes
from rlhub.utils.aio.results import Reject

if TYPE_CHECKING:
    from rlhub.single_controller.async_actor import ActorAddress, ActorConnection


class WorkflowKey(NamedTuple):
    """Identifies the workflow of an episode.  purpose: selects one of the actor's sampling parameters.  name: as `build_workflow`
    takes it."""

    purpose: str
    name: str


@dataclass(slots=True, kw_only=True, frozen=True)
class EpisodeActorSettings:
    """The parts from which an episode actor builds its workflows; they are sent to the actor.

    tokenizer: a function that builds it.  samplings: the sampling parameters by purpose.  kwargs: the workflows' own settings.
    folder: the driver's working directory, to which relative paths in settings and names refer; "" stays in the process's own.
    lends_environments: the driver leases environments to the episodes; if False, each workflow runs its own in the actor.
    vocab_size: token ids from it on are refused where tokens stay in the actor; None: all are taken.  reward: the function that
    judges each response alone, with the actor's share of its processes; None: there is none.
    """

    tokenizer: Callable[[], Any]
    samplings: Mapping[str, SamplingParams]
    max_prompt_length: int
    max_response_length: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    lends_environments: bool = False
    vocab_size: int | None = None
    reward: RewardFunction | None = None


@dataclass(slots=True, kw_only=True, frozen=True)
class CompletionRequest:
    """A request for a completion; the response is a Completion.  followed: the episode wants the tokens while they are
    sampled."""

    number: int
    request: GenerationRequest
    params: SamplingParams
    followed: bool = False


@dataclass(slots=True, kw_only=True, frozen=True)
class RequestCancelled:
    """The episode no longer waits for the response to this request."""

    number: int


@dataclass(slots=True, kw_only=True, frozen=True)
class EpisodeEnded:
    """The last message of an episode whose tokens do not stay here, or that has several trajectories; else that is a
    TrajectoryRef.  rejected: the reason if it raised Reject."""

    trajectory: Sampled | None = None
    rejected: str | None = None


Message = CompletionRequest | EnvironmentRequest | RequestCancelled | EpisodeEnded

_CURRENT: ContextVar[_Episode] = ContextVar("rlhub_episode")
"""The episode that the running code belongs to.  All episodes of a workflow share its parts, and so the same environments."""


class EpisodeActor:
    """Runs many episodes on one event loop.  A run is one attempt at an episode, and has a number of its own."""

    def __init__(self, settings: EpisodeActorSettings) -> None:
        if settings.folder and os.getcwd() != settings.folder:
            os.chdir(settings.folder)
        self._settings = settings
        self._tokenizer = settings.tokenizer()
        self._workflows: dict[WorkflowKey, RolloutWorkflow] = {}
        self._episodes: dict[int, _Episode] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._replicas: dict[int, tuple[ActorConnection, float | None]] = {}
        self._reports = ReportBox()
        self._leaving: set[asyncio.Task[None]] = set()
        self._kept = TrajectoryStore("", vocab_size=settings.vocab_size)
        self._scorer = None if settings.reward is None else RowScorer(settings.reward.pool(), self._tokenizer)

    async def take_prompt(
        self,
        number: int,
        workflow: tuple[str, str],
        ordinal: int,
        prompt_ids: tuple[int, ...],
        row: Mapping[str, Any],
        keep: bool,
        direct: bool,
    ) -> None:
        """Takes a prompt, once for all of its episodes, and the key of the workflow that runs them.

        keep: the tokens of its episodes stay here under the number of their run.  direct: generations go to replicas from here.
        """
        self._prompts[number] = _Prompt(WorkflowKey(*workflow), ordinal, prompt_ids, row, keep, direct)

    async def take_replica(self, number: int, address: ActorAddress, deadline_s: float | None) -> None:
        """Takes the address of a replica, which `deliver` names by this number, and the longest wait for a completion of it."""
        self._replicas[number] = address.connect(), deadline_s

    async def deliver(self, orders: Orders) -> None:
        """Starts these episodes and generations, and forgets these prompts; returns at once."""
        started, placed, forgotten = orders
        for run, *_ in started:
            if run in self._episodes:
                raise WorkflowError(f"run {run} of an episode goes on already: give every run a number of its own")
        for start in started:
            self._start(start)
        for run, request, replica, *request_id in placed:
            self._place(run, request, replica, request_id[0] if request_id else None)
        for number in forgotten:
            self._prompts.pop(number, None)

    def _start(self, start: Start) -> None:
        run, prompt, sample, seed, *partial = start
        key, ordinal, prompt_ids, row, keep, direct = self._prompts[prompt]
        before = partial[0] if partial else None
        data = EpisodeData(prompt_ids=prompt_ids, ordinal=ordinal, sample=sample, seed=seed, row=row, partial=before)
        episode = self._episodes[run] = _Episode(run, data, self._reports, direct=direct)
        episode.task = asyncio.create_task(self._run(episode, key, data, keep=keep))

    def _place(self, run: int, request: int, replica: int, request_id: str | None) -> None:
        """Lets a generation that waits go to a replica; one that nothing waits for any more is ignored."""
        episode = self._episodes.get(run)
        if episode is not None and request in episode.generations:
            connection, deadline_s = self._replicas[replica]
            episode.generate_at(request, connection, request_id, deadline_s)

    async def reports(self, have: int) -> tuple[Any, ...]:
        """Returns what there is to tell since the reports of number `have`; waits for the first.  They are a tuple, for the name
        of Reports is longer than one of them."""
        return tuple(await self._reports.take(have))

    async def next_message(self, run: int) -> Message:
        """Returns the next message of the episode, in order.  Raises the episode's error; the run ends with it."""
        episode = self._episodes.get(run)
        if episode is None:
            raise WorkflowError(f"no run {run} of an episode goes on here: it has ended or was cancelled")
        message = await episode.messages.get()
        if isinstance(message, EpisodeEnded | Exception) or episode.is_kept:
            self._forget(episode)
        if isinstance(message, Exception):
            raise message
        return message

    async def written(self, run: int) -> Completion | None:
        """Returns the tokens of the episode's first generation so far, for a checkpoint; None for an episode that has ended."""
        return self._episodes[run].written() if run in self._episodes else None

    async def respond(self, run: int, number: int, value: Any) -> None:
        """Passes the response to request `number` to the episode.  A response that nothing waits for is ignored."""
        if run in self._episodes:
            self._episodes[run].settle(number, value, None)

    async def report_progress(self, run: int, number: int, progress: Progress) -> None:
        """Passes more tokens of the completion of request `number` to the episode.  Calls must come one after the other, in
        order."""
        if run in self._episodes:
            self._episodes[run].report_progress(number, progress)

    async def fail_request(self, run: int, number: int, error: RlhubError) -> None:
        """Raises this error in the episode, as the outcome of request `number`."""
        if run in self._episodes:
            self._episodes[run].settle(number, None, error)

    async def cancel(self, run: int) -> None:
        """Cancels an episode; its code cleans up after this call has returned.  An unknown run is ignored."""
        self._kept.forget(str(run))
        episode = self._episodes.pop(run, None)
        self._reports.wake()
        if episode is not None and episode.task is not None:
            episode.unwanted = True
            episode.task.cancel()
            self._leaving.add(episode.task)
            episode.task.add_done_callback(self._leaving.discard)

    async def rows(self, method: str, *args: Any) -> Any:
        """Calls a method of the store that has the tokens of finished episodes."""
        return await asyncio.to_thread(getattr(self._kept, method), *args)

    async def score(self, keys: Sequence[str], prompt: Mapping[str, Any]) -> tuple[Any, ...]:
        """Scores finished episodes of a prompt by the reward function; returns PackedOutcomes in the order of the keys, as a
        tuple, for the class's name is as long as the scores."""
        assert self._scorer is not None, "the driver asks only where there is a function"
        return tuple(pack_outcomes(await self._scorer.score(prompt, self._kept.responses(keys))))

    async def close(self) -> None:
        """Cancels all episodes and closes their workflows."""
        for run in list(self._episodes):
            await self.cancel(run)
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await asyncio.gather(*(workflow.aclose() for workflow in self._workflows.values()))
        self._workflows.clear()
        if self._scorer is not None:
            self._scorer.close()

    async def _run(self, episode: _Episode, key: WorkflowKey, data: EpisodeData, *, keep: bool) -> None:
        _CURRENT.set(episode)
        end: EpisodeEnded | Exception
        try:
            trajectory = await self._workflow(key).arun_episode(episode, data)
            if keep and isinstance(trajectory, Episode) and not episode.unwanted:
                trajectory = self._kept.keep_episode(str(episode.run), trajectory)
            if keep and isinstance(trajectory, Trajectory) and not episode.unwanted:
                self._reports.next.kept.append(pack_ref(episode.run, self._kept.keep(str(episode.run), trajectory)))
                episode.is_kept = True
                return self._forget(episode)
            assert not isinstance(trajectory, TrajectoryRef), "only the store makes these"
            end = EpisodeEnded(trajectory=trajectory)
        except Reject as reason:
            end = EpisodeEnded(rejected=str(reason))
        except asyncio.CancelledError:
            if episode.unwanted:
                raise
            end = WorkflowError(f"episode {data.session} was cancelled by its own code")
        except Exception as error:  # noqa: BLE001  the task's boundary: raised where the driver asks for the next message
            end = error
        finally:
            episode.stop_generations()
        episode.post(end)

    def _forget(self, episode: _Episode) -> None:
        """Forgets an episode that has ended, once the driver has fetched its messages."""
        if episode.messages.empty():
            self._episodes.pop(episode.run, None)

    def _workflow(self, key: WorkflowKey) -> RolloutWorkflow:
        if key not in self._workflows:
            settings = self._settings
            parts = WorkflowParts(
                tokenizer=self._tokenizer,
                sampling=settings.samplings[key.purpose],
                max_prompt_length=settings.max_prompt_length,
                max_response_length=settings.max_response_length,
                score=no_turn_scores if self._scorer is None else self._scorer.score_text,
                kwargs=settings.kwargs,
                environments=DriverEnvironmentSource(_current) if settings.lends_environments else None,
            )
            self._workflows[key] = build_workflow(key.name, parts)
        return self._workflows[key]


class _Prompt(NamedTuple):
    workflow: WorkflowKey
    ordinal: int
    prompt_ids: tuple[int, ...]
    row: Mapping[str, Any]
    keep: bool
    direct: bool


@dataclass(slots=True)
class _Generation:
    """A generation that goes to replicas directly.  before: the tokens of a stopped run that it continues; done: those since.
    part: the task that gets more from a replica."""

    request: GenerationRequest
    params: SamplingParams
    before: Completion | None = None
    done: Completion | None = None
    part: asyncio.Task[None] | None = None

    def next(self, request_id: str) -> GenerationRequest:
        """Returns the request that continues after the tokens so far."""
        tokens = [] if self.done is None else self.done.token_ids
        first = self.request
        prompt_ids = [*first.prompt_ids, *tokens] if tokens else first.prompt_ids
        return replace(first, prompt_ids=prompt_ids, request_id=request_id, start=first.start + len(tokens))


class _Episode:
    """One running episode, and the engine that its code calls.  direct: it generates at replicas that the driver chooses."""

    def __init__(self, run: int, data: EpisodeData, reports: ReportBox, *, direct: bool) -> None:
        self.run, self._data, self._reports, self._direct = run, data, reports, direct
        self.generations: dict[int, _Generation] = {}
        self._first: _Generation | None = None
        self.messages: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.unwanted = self.is_kept = False
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._following: dict[int, Follow] = {}
        self._numbers = itertools.count()

    def post(self, message: Message | Exception) -> None:
        """Lets the driver fetch a message."""
        self.messages.put_nowait(message)
        self._reports.next.waiting.append(self.run)

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """Generates with the driver's engine, or at a replica that this chooses."""
        if self._direct and follow is None:
            return await self._generate_directly(request, params)
        asked = CompletionRequest(number=next(self._numbers), request=request, params=params, followed=follow is not None)
        if follow is not None:
            self._following[asked.number] = follow
        try:
            completion: Completion = await self._send(asked)
        finally:
            self._following.pop(asked.number, None)
        return completion

    async def _generate_directly(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        generation, partial = _Generation(request, params), self._data.partial
        if self._first is None and (partial is None or partial.finish_reason == "abort"):
            self._first = generation
            generation.before = partial if request.start else None
        cost = len(request.prompt_ids) + params.max_new_tokens
        number = next(self._numbers)
        self.generations[number] = generation
        session = () if request.session == self._data.session else (request.session,)
        asked: PlaceRequest = (self.run, number, cost, *session)
        try:
            await self._answer(number, lambda: self._reports.next.placing.append(asked))
        finally:
            self._stop(self.generations.pop(number))
        assert generation.done is not None, "settled after its last part"
        return generation.done

    def generate_at(self, number: int, replica: ActorConnection, request_id: str | None, deadline_s: float | None) -> None:
        """Generates at a replica for request `number`, after the tokens that it has, and reports the numbers of what came.

        The episode gets its completion, unless that is aborted: then the driver names a replica again, or responds.
        """
        generation = self.generations[number]
        name = self._data.session if request_id is None else request_id
        generation.part = asyncio.create_task(self._generate_at(number, generation, replica, name, deadline_s))

    async def _generate_at(
        self, number: int, generation: _Generation, replica: ActorConnection, request_id: str, deadline_s: float | None
    ) -> None:
        request, params = generation.next(request_id), generation.params
        try:
            part: Completion = await replica.call("agenerate", request, params, deadline_s=deadline_s)
        except Exception as error:  # noqa: BLE001  the task's boundary: the router repeats the request, or the episode gets it
            known = error if isinstance(error, RlhubError) else EngineError(f"{type(error).__name__}: {error}")
            return self._reports.next.generated.append((self.run, number, known))
        generation.done = join(generation.done, part)
        code = FINISH_CODES[part.finish_reason]
        self._reports.next.generated.append((self.run, number, len(part.token_ids), code))
        if part.finish_reason != "abort":
            self.settle(number, None, None)

    def stop_generations(self) -> None:
        """Ends the requests at replicas that still run."""
        for generation in self.generations.values():
            self._stop(generation)

    @staticmethod
    def _stop(generation: _Generation) -> None:
        if generation.part is not None:
            generation.part.cancel()

    def written(self) -> Completion | None:
        """Returns the tokens of the first generation so far, those of a stopped run included."""
        if self._first is None:
            return self._data.partial
        before, done = self._first.before, self._first.done
        return before if done is None else join(before, done)

    def report_progress(self, number: int, progress: Progress) -> None:
        """Passes tokens to the follower of this request, unless its completion has already arrived."""
        waiting = self._open.get(number)
        if waiting is None or waiting.done():
            return
        try:
            self._following[number](progress)
        except Exception as error:  # noqa: BLE001  the follower's own code: its error is that of its request
            waiting.set_exception(error)
            self.post(RequestCancelled(number=number))

    async def call_environment(self, lease: int, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a method of one of the driver's environments."""
        return await self._send(EnvironmentRequest(number=next(self._numbers), lease=lease, method=method, arguments=arguments))

    def notify_environment(self, lease: int, method: str) -> None:
        """Sends a message without a response, because the driver may no longer serve the episode."""
        self.post(EnvironmentRequest(number=next(self._numbers), lease=lease, method=method))

    def settle(self, number: int, value: Any, error: RlhubError | None) -> None:
        """Completes an open request with a response or an error."""
        waiting = self._open.get(number)
        if waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(value)
        else:
            waiting.set_exception(error)

    async def _send(self, request: CompletionRequest | EnvironmentRequest) -> Any:
        return await self._answer(request.number, lambda: self.post(request))

    async def _answer(self, number: int, ask: Callable[[], None]) -> Any:
        """Asks for something and returns the response to request `number`."""
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        ask()
        try:
            return await answer
        except asyncio.CancelledError:
            self.post(RequestCancelled(number=number))
            raise
        finally:
            del self._open[number]


def _current() -> _Episode:
    """Returns the episode that the running code belongs to.  Raises WorkflowError outside of an episode."""
    episode = _CURRENT.get(None)
    if episode is None:
        raise WorkflowError(
            "an environment was asked for by code that belongs to no episode: use the workflow's parts within arun_episode"
        )
    return episode
