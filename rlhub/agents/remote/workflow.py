"""RemoteWorkflow: an episode whose own code runs in an episode host, while it generates and scores on the driver's loop.

To the executor it is a workflow like any other: the engine that it gets answers what the remote episode asks, so routing,
sessions, checkpoints of partial generations and cancellation are those of an episode on the driver.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from functools import partial
from typing import Any

from rlhub.agents.remote.environment_asks import RELEASE, EnvironmentAnswers, EnvironmentAsk
from rlhub.agents.remote.episode_host import Ask, Ended, ScoreAsk, Withdrawn, WorkflowKey
from rlhub.agents.remote.episode_hosts import EpisodeHosts
from rlhub.agents.remote.host_set import Host, own_error
from rlhub.agents.remote.streaming import extend
from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.engines.rollout.base import Completion, Progress
from rlhub.errors import DeadlineError, EngineError, RlhubError, WorkerDiedError, WorkerError
from rlhub.utils.aio.results import Reject

RETRIES = 3
"""How often an episode begins anew after its host died: one that kills every host must not use them all up."""
CANCEL_S = 60.0
"""For a host to take note that an episode is not wanted any more, which takes it no time; one that cannot hangs."""

_runs = itertools.count()


class RemoteWorkflow(RolloutWorkflow):
    """parts: the driver's; only `score` and `environments` are used here.  key: the workflow that the hosts build."""

    def __init__(self, parts: WorkflowParts, key: WorkflowKey, hosts: EpisodeHosts) -> None:
        super().__init__(parts)
        self._key, self._hosts = key, hosts

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        """In the host with the fewest episodes; from its beginning in another one when that dies."""
        for attempt in itertools.count():
            host = await self._hosts.choose()
            try:
                return await self._in(host, engine, data)
            except WorkerDiedError as error:
                if not host.actor.ended:  # the episode's own code raised it
                    raise
                self._hosts.lost(host, error)
                if attempt >= RETRIES:
                    raise
                self._hosts.counts["episodes_again"] += 1
        raise AssertionError("unreachable")

    async def _in(self, host: Host, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        host.episodes += 1
        run = _Run(host, f"{data.session}/{next(_runs)}", engine, self.parts)
        try:
            return await run.play(self._key, data)
        except WorkerError as error:
            own = own_error(error)
            if own is error:
                raise
            raise own from error
        finally:
            host.episodes -= 1
            await run.stop_answering()
            if not run.over and not host.actor.ended:
                self._hosts.background(self._cancel(host, run.session))

    async def _cancel(self, host: Host, session: str) -> None:
        try:
            await host.actor.call("cancel", session, deadline_s=CANCEL_S)
        except (WorkerDiedError, DeadlineError) as error:
            self._hosts.lost(host, error)


class _Run:
    """One run of an episode in a host.  over: nothing of it is left there."""

    def __init__(self, host: Host, session: str, engine: EpisodeEngine, parts: WorkflowParts) -> None:
        self.session = session
        self.over = False
        self._actor, self._engine, self._parts = host.actor, engine, parts
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._environments = EnvironmentAnswers(parts.environments)

    async def play(self, key: WorkflowKey, data: EpisodeData) -> Trajectory | None:
        """Answer what it asks until its end."""
        await self._actor.call("begin", self.session, key, data)
        while True:
            match await self._next():
                case Ended(rejected=None, trajectory=trajectory):
                    return trajectory
                case Ended(rejected=reason):
                    raise Reject(reason)
                case Withdrawn(number=number):
                    if number in self._answering:
                        self._answering[number].cancel()
                case question:
                    task = asyncio.create_task(self._answer(question))
                    self._answering[question.number] = task
                    task.add_done_callback(partial(self._answered, question.number))

    def _answered(self, number: int, task: asyncio.Task[None]) -> None:
        self._answering.pop(number, None)

    async def stop_answering(self) -> None:
        """Nobody waits for what is still generated or scored, and nobody uses the environments that it held."""
        tasks = list(self._answering.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._environments.give_back()

    async def _next(self) -> Any:
        try:
            message = await self._actor.call("next", self.session)
        except WorkerError:
            self.over = True
            raise
        self.over = isinstance(message, Ended)
        return message

    async def _answer(self, question: Ask | ScoreAsk | EnvironmentAsk) -> None:
        try:
            value: Any
            if isinstance(question, EnvironmentAsk):
                value = await self._environments.answer(question)
                if question.method == RELEASE:
                    return
            elif isinstance(question, Ask):
                value = await self._generate(question)
            else:
                value = await self._parts.score(question.row, question.text)
            await self._actor.call("answer", self.session, question.number, value)
        except Exception as error:  # noqa: BLE001  the task's boundary: raised where the episode waits for the answer
            with suppress(WorkerDiedError):  # the host: whoever waits in `next` is told
                await self._actor.call("refuse", self.session, question.number, _portable(error))

    async def _generate(self, ask: Ask) -> Completion:
        if not ask.followed:
            return await self._engine.agenerate(ask.request, ask.params)
        told: asyncio.Queue[Progress] = asyncio.Queue()
        telling = asyncio.create_task(self._tell(ask.number, told))
        try:
            return await self._engine.agenerate(ask.request, ask.params, told.put_nowait)
        finally:
            telling.cancel()

    async def _tell(self, number: int, told: asyncio.Queue[Progress]) -> None:
        """Each call takes along what came during the one before."""
        with suppress(WorkerError):  # the answer's own call meets the same
            while True:
                progress = await told.get()
                while not told.empty():
                    extend(progress, told.get_nowait())
                await self._actor.call("tell", self.session, number, progress)


def _portable(error: Exception) -> RlhubError:
    """As it is raised in the host.  A WorkerError would there be taken for one of the host's own."""
    if isinstance(error, RlhubError) and not isinstance(error, WorkerError):
        return error
    return EngineError(f"{type(error).__name__}: {error}")
