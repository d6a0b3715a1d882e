"""EpisodeActor, the object of an AsyncActor: runs the episodes' own code (tools, tokenizing, environments) in its process.

The driver fetches the requests of an episode with `next_message` and sends each response with `respond`; until then the episode
waits for it.  An episode may have several open requests.  Environment actors stay with the driver.  For a generation the driver
only chooses the replica (`generate_at`): this process sends it the request and gets the tokens.  The reward function scores turns
and finished episodes here.  So neither tokens nor texts pass through the driver, but those that are followed while they are
sampled.
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
from rlhub.agents.remote.trajectory_store import TrajectoryStore
from rlhub.agents.trajectory import Episode, FinishReason, Sampled, Trajectory, TrajectoryRef
from rlhub.agents.workflows.base import EpisodeData, RolloutWorkflow, WorkflowParts, build_workflow
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, Progress, SamplingParams
from rlhub.errors import DeadlineError, RlhubError, WorkerError, WorkflowError
from rlhub.rewards.pool import RewardFunction
from rlhub.rewards.rows import PackedOutcomes, RowScorer, no_turn_scores, pack_outcomes
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


class PlaceRequest(NamedTuple):
    """A request for a replica to generate at; there is no response but `generate_at`, unless the generation is aborted.  cost:
    see RemoteGeneration.  session: for sticky routing, "" for that of the episode."""

    number: int
    cost: int
    session: str


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


Message = CompletionRequest | PlaceRequest | EnvironmentRequest | RequestCancelled | EpisodeEnded | TrajectoryRef

SentMessage = CompletionRequest | tuple[int, int, str] | EnvironmentRequest | RequestCancelled | EpisodeEnded | TrajectoryRef
"""A Message on its way; a PlaceRequest is a tuple, because the name of its class is longer than all else in it."""

_CURRENT: ContextVar[_Episode] = ContextVar("rlhub_episode")
"""The episode that the running code belongs to.  All episodes of a workflow share its parts, and so the same environments."""


class EpisodeActor:
    """Runs many episodes on one event loop.  A session is one run of one episode."""

    def __init__(self, settings: EpisodeActorSettings) -> None:
        if settings.folder and os.getcwd() != settings.folder:
            os.chdir(settings.folder)
        self._settings = settings
        self._tokenizer = settings.tokenizer()
        self._workflows: dict[WorkflowKey, RolloutWorkflow] = {}
        self._episodes: dict[str, _Episode] = {}
        self._prompts: dict[int, _Prompt] = {}
        self._replicas: dict[int, ActorConnection] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._kept = TrajectoryStore("", vocab_size=settings.vocab_size)
        self._scorer = None if settings.reward is None else RowScorer(settings.reward.pool(), self._tokenizer)

    async def take_prompt(
        self, number: int, workflow: tuple[str, str], prompt_ids: tuple[int, ...], row: Mapping[str, Any]
    ) -> None:
        """Takes a prompt, once for all of its episodes, and the key of the workflow that runs them."""
        self._prompts[number] = _Prompt(WorkflowKey(*workflow), prompt_ids, row)

    async def forget_prompt(self, number: int) -> None:
        """Forgets a prompt: none of its episodes runs here any more."""
        self._prompts.pop(number, None)

    async def take_replica(self, number: int, address: ActorAddress) -> None:
        """Takes the address of a replica, which `generate_at` names by this number."""
        self._replicas[number] = address.connect()

    async def begin(self, session: str, prompt: int, episode: EpisodeStart) -> SentMessage:
        """Starts an episode of a prompt that `take_prompt` has brought, and returns its first message as `next_message` does."""
        if session in self._episodes:
            raise WorkflowError(f"session {session} runs already: give every run of an episode a name of its own")
        workflow, prompt_ids, row = self._prompts[prompt]
        ordinal, sample, seed, partial, keep, direct = episode
        data = EpisodeData(prompt_ids=prompt_ids, ordinal=ordinal, sample=sample, seed=seed, row=row, partial=partial)
        begun = self._episodes[session] = _Episode(data, direct=direct)
        begun.task = asyncio.create_task(self._run(begun, workflow, data, session if keep else ""))
        return await self.next_message(session)

    async def next_message(self, session: str) -> SentMessage:
        """Waits for the next message of the episode and returns it, in order.  Raises the episode's error; the session ends with
        it."""
        episode = self._episodes.get(session)
        if episode is None:
            raise WorkflowError(f"no session {session} runs here: it has ended or was cancelled")
        message = await episode.messages.get()
        if isinstance(message, EpisodeEnded | TrajectoryRef | Exception):
            self._episodes.pop(session, None)
        if isinstance(message, Exception):
            raise message
        return (message.number, message.cost, message.session) if isinstance(message, PlaceRequest) else message

    async def generate_at(
        self, session: str, number: int, replica: int, request_id: str, deadline_s: float | None
    ) -> tuple[int, FinishReason] | RlhubError:
        """Generates at a replica for request `number`, after the tokens that it has; returns how many more tokens there are, and
        why these ended, or the error of the replica.  The episode gets its completion, unless that is aborted: then the driver
        calls again, or responds."""
        episode = self._episodes.get(session)
        generation = episode.generations.get(number) if episode is not None else None
        if episode is None or generation is None:
            raise WorkflowError(f"session {session} does not wait for generation {number}")
        try:
            call = self._replicas[replica].call
            part: Completion = await call("agenerate", generation.next(request_id), generation.params, deadline_s=deadline_s)
        except (WorkerError, DeadlineError) as error:
            return error
        generation.done = join(generation.done, part)
        if part.finish_reason != "abort":
            episode.settle(number, None, None)
        return len(part.token_ids), part.finish_reason

    async def written(self, session: str) -> Completion | None:
        """Returns the tokens of the episode's first generation so far, for a checkpoint; None for an episode that has ended."""
        return self._episodes[session].written() if session in self._episodes else None

    async def respond(self, session: str, number: int, value: Any) -> None:
        """Passes the response to request `number` to the episode.  A response that nothing waits for is ignored."""
        if session in self._episodes:
            self._episodes[session].settle(number, value, None)

    async def report_progress(self, session: str, number: int, progress: Progress) -> None:
        """Passes more tokens of the completion of request `number` to the episode.  Calls must come one after the other, in
        order."""
        if session in self._episodes:
            self._episodes[session].report_progress(number, progress)

    async def fail_request(self, session: str, number: int, error: RlhubError) -> None:
        """Raises this error in the episode, as the outcome of request `number`."""
        if session in self._episodes:
            self._episodes[session].settle(number, None, error)

    async def cancel(self, session: str) -> None:
        """Cancels an episode; its code cleans up after this call has returned.  An unknown session is ignored."""
        self._kept.forget(session)
        episode = self._episodes.pop(session, None)
        if episode is not None and episode.task is not None:
            episode.unwanted = True
            episode.task.cancel()
            self._leaving.add(episode.task)
            episode.task.add_done_callback(self._leaving.discard)

    async def rows(self, method: str, *args: Any) -> Any:
        """Calls a method of the store that has the tokens of finished episodes."""
        return await asyncio.to_thread(getattr(self._kept, method), *args)

    async def score(self, keys: Sequence[str], prompt: Mapping[str, Any]) -> PackedOutcomes:
        """Scores finished episodes of a prompt by the reward function, and returns their outcomes in the order of the keys."""
        assert self._scorer is not None, "the driver asks only where there is a function"
        return pack_outcomes(await self._scorer.score(prompt, self._kept.responses(keys)))

    async def close(self) -> None:
        """Cancels all episodes and closes their workflows."""
        for session in list(self._episodes):
            await self.cancel(session)
        await asyncio.gather(*self._leaving, return_exceptions=True)
        await asyncio.gather(*(workflow.aclose() for workflow in self._workflows.values()))
        self._workflows.clear()
        if self._scorer is not None:
            self._scorer.close()

    async def _run(self, episode: _Episode, key: WorkflowKey, data: EpisodeData, kept_as: str) -> None:
        _CURRENT.set(episode)
        end: EpisodeEnded | TrajectoryRef | Exception
        try:
            trajectory = await self._workflow(key).arun_episode(episode, data)
            if kept_as and isinstance(trajectory, Episode) and not episode.unwanted:
                trajectory = self._kept.keep_episode(kept_as, trajectory)
            if kept_as and isinstance(trajectory, Trajectory) and not episode.unwanted:
                end = self._kept.keep(kept_as, trajectory)
            else:
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
        episode.messages.put_nowait(end)

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


EpisodeStart = tuple[int, int, int, Completion | None, bool, bool]
"""Ordinal, sample, seed and partial of EpisodeData; whether the tokens stay in the actor under the name of the session, so that
the driver gets a TrajectoryRef; and whether generations go to replicas directly.  A tuple, because names double its size."""


class _Prompt(NamedTuple):
    workflow: WorkflowKey
    prompt_ids: tuple[int, ...]
    row: Mapping[str, Any]


@dataclass(slots=True)
class _Generation:
    """A generation that goes to replicas directly.  before: the tokens of a stopped run that it continues; done: those since."""

    request: GenerationRequest
    params: SamplingParams
    before: Completion | None = None
    done: Completion | None = None

    def next(self, request_id: str) -> GenerationRequest:
        """Returns the request that continues after the tokens so far."""
        tokens = [] if self.done is None else self.done.token_ids
        first = self.request
        prompt_ids = [*first.prompt_ids, *tokens] if tokens else first.prompt_ids
        return replace(first, prompt_ids=prompt_ids, request_id=request_id, start=first.start + len(tokens))


class _Episode:
    """One running episode, and the engine that its code calls.  direct: it generates at replicas that the driver chooses."""

    def __init__(self, data: EpisodeData, *, direct: bool) -> None:
        self._data, self._direct = data, direct
        self.generations: dict[int, _Generation] = {}
        self._first: _Generation | None = None
        self.messages: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.unwanted = False
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._following: dict[int, Follow] = {}
        self._numbers = itertools.count()

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
        session = "" if request.session == self._data.session else request.session
        asked = PlaceRequest(next(self._numbers), cost, session)
        self.generations[asked.number] = generation
        try:
            await self._send(asked)
        finally:
            del self.generations[asked.number]
        assert generation.done is not None, "settled after its last part"
        return generation.done

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
            self.messages.put_nowait(RequestCancelled(number=number))

    async def call_environment(self, lease: int, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a method of one of the driver's environments."""
        return await self._send(EnvironmentRequest(number=next(self._numbers), lease=lease, method=method, arguments=arguments))

    def notify_environment(self, lease: int, method: str) -> None:
        """Sends a message without a response, because the driver may no longer serve the episode."""
        self.messages.put_nowait(EnvironmentRequest(number=next(self._numbers), lease=lease, method=method))

    def settle(self, number: int, value: Any, error: RlhubError | None) -> None:
        """Completes an open request with a response or an error."""
        waiting = self._open.get(number)
        if waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(value)
        else:
            waiting.set_exception(error)

    async def _send(self, request: CompletionRequest | PlaceRequest | EnvironmentRequest) -> Any:
        answer = self._open[request.number] = asyncio.get_running_loop().create_future()
        self.messages.put_nowait(request)
        try:
            return await answer
        except asyncio.CancelledError:
            self.messages.put_nowait(RequestCancelled(number=request.number))
            raise
        finally:
            del self._open[request.number]


def _current() -> _Episode:
    """Returns the episode that the running code belongs to.  Raises WorkflowError outside of an episode."""
    episode = _CURRENT.get(None)
    if episode is None:
        raise WorkflowError(
            "an environment was asked for by code that belongs to no episode: use the workflow's parts within arun_episode"
        )
    return episode
