"""openai_agent: an existing agent, written with OpenAI's client, as an episode.

Each episode opens a session at an endpoint on the event loop of the episodes, and runs the agent with the session's address and
key.  The endpoint records what the policy writes for the agent as tokens; a history that the agent changes starts a new segment.
Each segment becomes a trajectory of the episode.

The agent is a coroutine, a plain function, which runs in a thread, or a program; none of them depends on rlhub.

    async def run(base_url: str, api_key: str, row: dict) -> float | None: ...

The reward is a number for the whole episode, or {"rewards": {name: number}} by the role of a conversation or the id of a
response.

A program finds OPENAI_BASE_URL and OPENAI_API_KEY in its environment, where OpenAI's client reads them, and the row as JSON on
its standard input.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhub.agents.openai_server.server import OpenAIServer, ServerOptions
from rlhub.agents.openai_server.sessions import Session, SessionLimits
from rlhub.agents.trajectory import Sampled, answer_of
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.agents.workflows.knobs import AgentKnobs
from rlhub.agents.workflows.registry import fill_knobs
from rlhub.errors import ConfigError, LoadError, WorkflowError
from rlhub.tools.registry import TOOL_FORMATS
from rlhub.utils.aio.results import Reject
from rlhub.utils.user_code import load_target

SHOWN = 2000  # characters of a failed program's error output in the message
MAX_ENDPOINTS = 64
"""Number of ports that are tried from a given one on: each process of rollout.agent.num_workers and validation has its own
endpoint."""
Reward = float | Mapping[str, float]
"""A reward of the whole episode, or rewards by role or by response."""
CLIENT_LOGGERS = ("httpx", "httpx2")
"""Loggers of OpenAI's client, which log a line for every request at the level at which a run reports its steps."""


class OpenAIAgent(RolloutWorkflow):
    """Runs an agent written with OpenAI's client as an episode; see AgentKnobs for its settings."""

    def __init__(self, parts: WorkflowParts) -> None:
        super().__init__(parts)
        self.knobs = fill_knobs(AgentKnobs, parts.kwargs)
        for name in CLIENT_LOGGERS:
            if (own := logging.getLogger(name)).level == logging.NOTSET:
                own.setLevel(logging.WARNING)
        if not self.knobs.agent:
            raise ConfigError("agent.kwargs.agent is not set: name path/to/agent.py:run or path/to/script.py")
        self._threads = ThreadPoolExecutor(self.knobs.max_agents, thread_name_prefix="agent")
        reads_reward = self.knobs.reward == "agent"
        self._agent = load_agent(self.knobs.agent, self.knobs.args, self._threads, reads_reward=reads_reward)
        self._limits = SessionLimits(prompt=parts.max_prompt_length, response=parts.max_response_length)
        self._server: OpenAIServer | None = None
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(self.knobs.max_agents)

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        async with self._places:
            return await self._episode(engine, data)

    async def _episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled:
        server, roles = await self._started(engine), self.knobs.roles
        session = server.open_session(data.session, seed=data.seed, limits=self._limits, engine=engine, roles=roles)
        try:
            reward = await self._run(server, session, data)
        finally:
            server.close_session(session)
        made = self._credited(session, reward)
        if made is None:
            raise Reject("the agent asked the policy for nothing" + (" that trains" if session.turns else ""))
        if session.full:
            answer_of(made).finish_reason = "length"
        return made

    def _credited(self, session: Session, reward: Reward | None) -> Sampled | None:
        """Returns what trains of the session, with the agent's own reward where that counts."""
        own, which = self.knobs.reward == "agent", self.knobs.segment
        if own and isinstance(reward, Mapping):
            if which != "all":
                raise WorkflowError(f"the agent {self.knobs.agent} gave several rewards, which need segment=all, got {which}")
            return session.credited(reward, self.knobs.turn_discount)
        made = session.episode() if which == "all" else session.trajectory(which)
        if made is not None and own:
            if reward is None or isinstance(reward, Mapping):
                raise WorkflowError(f"the agent {self.knobs.agent} gave no reward; return a number, or set reward=score")
            made.set_reward(reward)
        return made

    async def _run(self, server: OpenAIServer, session: Session, data: EpisodeData) -> Reward | None:
        """Runs the agent and returns its own reward, if it gives one.

        An error that the agent raises because its conversation is full ends the episode normally.
        """
        try:
            return await self._agent(server.base_url(session), session.token, data.row)
        except Exception:  # boundary to the user's code
            if not (session.full and session.turns):
                raise
            return 0.0

    async def _started(self, engine: EpisodeEngine) -> OpenAIServer:
        async with self._starting:
            if self._server is None:
                options = ServerOptions(
                    model=self.knobs.model,
                    max_model_len=self._limits.prompt + self._limits.response,
                    host=self.knobs.host,
                    port=self.knobs.port,
                    num_ports=MAX_ENDPOINTS if self.knobs.port else 1,
                    max_concurrent=self.knobs.max_concurrent,
                    find_calls=TOOL_FORMATS.get(self.knobs.format),
                    template_kwargs=self.knobs.chat_template_kwargs,
                )
                server = OpenAIServer(engine, self.parts.tokenizer, self.parts.sampling, options)
                await server.start()
                self._server = server
        return self._server

    async def aclose(self) -> None:
        if self._server is not None:
            await self._server.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)


class Agent(Protocol):
    """The interface of what an episode runs."""

    async def __call__(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Reward | None:
        """Does the task of the row; returns the reward if the agent determines one."""
        ...


@dataclass(slots=True, kw_only=True)
class FunctionAgent:
    """Calls `function` with the keywords base_url, api_key and row; a plain function runs in a thread of `threads`."""

    function: Callable[..., Any]
    threads: ThreadPoolExecutor

    async def __call__(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Reward | None:
        arguments = {"base_url": base_url, "api_key": api_key, "row": dict(row)}
        if inspect.iscoroutinefunction(self.function):
            found = await self.function(**arguments)
        else:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self.threads, lambda: self.function(**arguments))
        return as_reward(found)


@dataclass(slots=True, kw_only=True)
class ProgramAgent:
    """Runs `command` as a process, with the row on its standard input.  The process and all its children end with the episode."""

    command: Sequence[str]
    reads_reward: bool

    async def __call__(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> Reward | None:
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
            start_new_session=True,
        )
        try:
            out, err = await process.communicate(json.dumps(dict(row), default=_plain).encode())
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode != 0:
            told = err.decode(errors="replace")[-SHOWN:]
            raise WorkflowError(f"the agent {self.command[1]} ended with status {process.returncode}: {told}")
        lines = out.decode(errors="replace").strip().splitlines()
        return as_reward(lines[-1] if lines else None) if self.reads_reward else None


def load_agent(target: str, args: Sequence[str], threads: ThreadPoolExecutor, *, reads_reward: bool) -> Agent:
    """Returns the agent of `path/to/script.py`, or of a function `path/to/file.py:name` or `module:name`.  Raises ConfigError if
    there is none."""
    if target.endswith(".py"):
        script = Path(target).expanduser().resolve()
        if not script.is_file():
            raise ConfigError(f"agent: no such file: {script}")
        return ProgramAgent(command=[sys.executable, str(script), *args], reads_reward=reads_reward)
    try:
        function = load_target(target)
    except LoadError as error:
        raise ConfigError(f"agent: {error}") from error
    if not callable(function):
        raise ConfigError(f"agent: {target} is a {type(function).__name__}; expected a function run(base_url, api_key, row)")
    return FunctionAgent(function=function, threads=threads)


def as_reward(value: Any) -> Reward | None:
    """Returns the reward of a number, of {"reward": number}, of {"rewards": {name: number}} or of text that is one of them, and
    None for None.

    Raises WorkflowError for anything else.
    """
    try:
        given = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
        if isinstance(given, Mapping) and "rewards" in given:
            return {str(name): float(reward) for name, reward in given["rewards"].items()}
        given = given.get("reward") if isinstance(given, Mapping) else given
        return None if given is None else float(given)
    except (TypeError, ValueError, AttributeError):
        raise WorkflowError(f"the agent returned {value!r:.200}; expected a number, or nothing") from None


def _plain(value: Any) -> Any:
    """Returns numpy values as lists and numbers, and anything else that JSON cannot represent as text."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else str(value)
