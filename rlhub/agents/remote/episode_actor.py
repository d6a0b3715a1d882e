"""EpisodeActor, the object of an AsyncActor: runs the episodes' own code (tools, tokenizing, environments) in its process.

Generation and environment actors stay with the driver.  The driver fetches the requests of an episode with `next_message` and
sends each response with `respond`; until then the episode waits for it.  An episode may have several open requests.  The reward
function scores turns and finished episodes here, so that texts do not leave the process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlhub.agents.remote.environment_requests import DriverEnvironmentSource, EnvironmentRequest
from rlhub.agents.remote.trajectory_store import TrajectoryStore
from rlhub.agents.trajectory import Sampled, Trajectory
from rlhub.agents.workflows.base import EpisodeData, RolloutWorkflow, WorkflowParts, build_workflow
from rlhub.engines.rollout.base import Completion, Follow, GenerationRequest, Progress, SamplingParams
from rlhub.errors import RlhubError, WorkflowError
from rlhub.rewards.pool import RewardFunction
from rlhub.rewards.rows import PackedOutcomes, RowScorer, no_turn_scores, pack_outcomes
from rlhub.utils.aio.results import Reject


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
    """The last message of an episode.  rejected: the reason if it raised Reject."""

    trajectory: Sampled | None = None
    rejected: str | None = None


Message = CompletionRequest | EnvironmentRequest | RequestCancelled | EpisodeEnded

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
        self._leaving: set[asyncio.Task[None]] = set()
        self._kept = TrajectoryStore("", vocab_size=settings.vocab_size)
        self._scorer = None if settings.reward is None else RowScorer(settings.reward.pool(), self._tokenizer)

    async def begin(self, session: str, workflow: WorkflowKey, data: EpisodeData, keep: bool = False) -> None:
        """Starts an episode.  keep: its tokens stay here, under the name of the session, and the driver gets a TrajectoryRef."""
        if session in self._episodes:
            raise WorkflowError(f"session {session} runs already: give every run of an episode a name of its own")
        episode = self._episodes[session] = _Episode()
        episode.task = asyncio.create_task(self._run(episode, workflow, data, session if keep else ""))

    async def next_message(self, session: str) -> Message:
        """Waits for the next message of the episode and returns it, in order.  Raises the episode's error; the session ends with
        it."""
        episode = self._episodes.get(session)
        if episode is None:
            raise WorkflowError(f"no session {session} runs here: it has ended or was cancelled")
        message = await episode.messages.get()
        if isinstance(message, EpisodeEnded | Exception):
            self._episodes.pop(session, None)
        if isinstance(message, Exception):
            raise message
        return message

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
        self._kept.drop([session])
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
        end: EpisodeEnded | Exception
        try:
            trajectory = await self._workflow(key).arun_episode(episode, data)
            if kept_as and isinstance(trajectory, Trajectory) and not episode.unwanted:
                trajectory = self._kept.keep(kept_as, trajectory)
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


class _Episode:
    """One running episode, and the engine that its code calls."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message | Exception] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None
        self.unwanted = False
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._following: dict[int, Follow] = {}
        self._numbers = itertools.count()

    async def agenerate(self, request: GenerationRequest, params: SamplingParams, follow: Follow | None = None) -> Completion:
        """Generates with the driver's engine."""
        asked = CompletionRequest(number=next(self._numbers), request=request, params=params, followed=follow is not None)
        if follow is not None:
            self._following[asked.number] = follow
        try:
            completion: Completion = await self._send(asked)
        finally:
            self._following.pop(asked.number, None)
        return completion

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

    async def _send(self, request: CompletionRequest | EnvironmentRequest) -> Any:
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
