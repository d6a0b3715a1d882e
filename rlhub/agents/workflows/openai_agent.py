"""openai_agent: an existing agent, written with OpenAI's client, as an episode.

Each episode opens a session at an endpoint on the event loop of the episodes, and runs the agent with the session's address and
key.  The endpoint records what the policy writes for the agent as tokens; a history that the agent changes starts a new segment.
Each segment becomes a trajectory of the episode.

The agent is a coroutine, a plain function, which runs in a thread, or a program; none of them depends on rlhub.

    async def run(base_url: str, api_key: str, row: dict) -> float | None: ...

The reward is a number for the whole episode, or {"rewards": {name: number}} by the role of a conversation or the id of a
response.  {"reward": number, "metrics": {name: number}} reports further numbers as episode/<name>.

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
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from rlhub.agents.openai_server.answering import ServerOptions
from rlhub.agents.openai_server.online import OnlineSessions, plain
from rlhub.agents.openai_server.server import OpenAIServer
from rlhub.agents.openai_server.sessions import Session, SessionLimits
from rlhub.agents.trajectory import Sampled, answer_of
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.agents.workflows.knobs import AgentKnobs, EndpointKnobs, VerifiersKnobs
from rlhub.agents.workflows.registry import fill_knobs
from rlhub.errors import ConfigError, LoadError, WorkflowError
from rlhub.sandboxes.base import Given, SandboxProvider
from rlhub.sandboxes.registry import load_sandbox
from rlhub.tools.registry import reply_format
from rlhub.utils.aio.results import Reject
from rlhub.utils.user_code import load_target

SHOWN = 2000  # characters of a failed program's error output in the message
MAX_ENDPOINTS = 64
"""Number of ports that are tried from a given one on: each process of rollout.agent.num_workers and validation has its own
endpoint."""
AGENT_LIMITS = {"timeout_s": 86400.0, "memory_gb": 4.0, "processes": 256, "disk_mb": 4096.0}
"""Limits of a sandboxed program where its settings name none; its time ends with the episode's."""
Reward = float | Mapping[str, float]
"""A reward of the whole episode, or rewards by role or by response."""
CLIENT_LOGGERS = ("httpx", "httpx2")
"""Loggers of OpenAI's client, which log a line for every request at the level at which a run reports its steps."""


class EndpointWorkflow(RolloutWorkflow):
    """Records episodes as sessions of an endpoint on the event loop of the episodes.

    online: the sessions that applications open; None where the workflow opens them.  name: the author of rewards, for messages.
    """

    def __init__(self, parts: WorkflowParts, knobs: EndpointKnobs, name: str, online: OnlineSessions | None = None) -> None:
        super().__init__(parts)
        self.endpoint, self._name, self._online = knobs, name, online
        self._limits = SessionLimits(prompt=parts.max_prompt_length, response=parts.max_response_length)
        self._server: OpenAIServer | None = None
        self._starting = asyncio.Lock()

    async def started(self, engine: EpisodeEngine) -> OpenAIServer:
        """Returns the endpoint, which listens.  engine: generates for requests outside of sessions."""
        async with self._starting:
            if self._server is None:
                knobs, tokenizer = self.endpoint, self.parts.tokenizer
                form = reply_format(knobs.format, knobs.reasoning_parser, tokenizer, knobs.chat_template_kwargs)
                options = ServerOptions(
                    model=knobs.model,
                    max_model_len=self._limits.prompt + self._limits.response,
                    host=knobs.host,
                    port=knobs.port,
                    num_ports=MAX_ENDPOINTS if knobs.port and self._online is None else 1,
                    max_concurrent=knobs.max_concurrent,
                    find_calls=form.find_calls,
                    parser=form.parser,
                    template_kwargs=knobs.chat_template_kwargs,
                )
                server = OpenAIServer(engine, tokenizer, self.parts.sampling, options, online=self._online)
                await server.start()
                self._server = server
        return self._server

    def sampled(self, session: Session, reward: Reward | None) -> Sampled | None:
        """Returns what trains of the session, with the author's own reward where that counts; None where nothing trains."""
        made = self._credited(session, reward)
        if made is not None and session.full:
            answer_of(made).finish_reason = "length"
        return made

    def _credited(self, session: Session, reward: Reward | None) -> Sampled | None:
        own, which = self.endpoint.reward == "agent", self.endpoint.segment
        if own and isinstance(reward, Mapping):
            if which != "all":
                raise WorkflowError(f"{self._name} gave several rewards, which need segment=all, got {which}")
            return session.credited(reward, self.endpoint.turn_discount)
        made = session.episode() if which == "all" else session.trajectory(which)
        if made is not None and own:
            if reward is None or isinstance(reward, Mapping):
                raise WorkflowError(f"{self._name} gave no reward; return a number, or set reward=score")
            made.set_reward(reward)
        return made

    async def aclose(self) -> None:
        if self._server is not None:
            await self._server.aclose()


@dataclass(slots=True, kw_only=True, frozen=True)
class AgentResult:
    """The result of an agent's run.  metrics: numbers of the episode."""

    reward: Reward | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


class AgentEpisodes(EndpointWorkflow):
    """Runs an agent against the endpoint for each episode; a subclass says which."""

    def __init__(self, parts: WorkflowParts, knobs: AgentKnobs | VerifiersKnobs, name: str) -> None:
        super().__init__(parts, knobs, name)
        self._places = asyncio.Semaphore(knobs.max_agents)

    @abstractmethod
    async def run_agent(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> AgentResult:
        """Runs the agent for this row."""

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        async with self._places:
            return await self._episode(engine, data)

    async def _episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled:
        server, roles = await self.started(engine), self.endpoint.roles
        session = server.open_session(data.session, seed=data.seed, limits=self._limits, engine=engine, roles=roles)
        try:
            result = await self._run(server, session, data)
        finally:
            server.close_session(session)
        made = self.sampled(session, result.reward)
        if made is None:
            raise Reject("the agent asked the policy for nothing" + (" that trains" if session.turns else ""))
        made.metrics |= result.metrics
        return made

    async def _run(self, server: OpenAIServer, session: Session, data: EpisodeData) -> AgentResult:
        """Runs the agent and returns what it gives.

        An error that the agent raises because its conversation is full ends the episode normally.
        """
        try:
            return await self.run_agent(server.base_url(session), session.token, data.row)
        except Exception:  # boundary to the user's code
            if not (session.full and session.turns):
                raise
            return AgentResult(reward=0.0)


class OpenAIAgent(AgentEpisodes):
    """Runs an agent written with OpenAI's or Anthropic's client as an episode; see AgentKnobs for its settings."""

    def __init__(self, parts: WorkflowParts) -> None:
        self.knobs = fill_knobs(AgentKnobs, parts.kwargs)
        super().__init__(parts, self.knobs, f"the agent {self.knobs.agent}")
        for name in CLIENT_LOGGERS:
            if (own := logging.getLogger(name)).level == logging.NOTSET:
                own.setLevel(logging.WARNING)
        if not self.knobs.agent:
            raise ConfigError("agent.kwargs.agent is not set: name path/to/agent.py:run or path/to/script.py")
        self._threads = ThreadPoolExecutor(self.knobs.max_agents, thread_name_prefix="agent")
        reads_reward = self.knobs.reward == "agent"
        self._agent = load_agent(self.knobs, self._threads, reads_reward=reads_reward)

    async def run_agent(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> AgentResult:
        return await self._agent(base_url, api_key, row)

    async def aclose(self) -> None:
        await super().aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)


class Agent(Protocol):
    """The interface of what an episode runs."""

    async def __call__(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> AgentResult:
        """Does the task of the row; returns the reward if the agent determines one."""
        ...


@dataclass(slots=True, kw_only=True)
class FunctionAgent:
    """Calls `function` with the keywords base_url, api_key and row; a plain function runs in a thread of `threads`."""

    function: Callable[..., Any]
    threads: ThreadPoolExecutor

    async def __call__(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> AgentResult:
        arguments = {"base_url": base_url, "api_key": api_key, "row": dict(row)}
        if inspect.iscoroutinefunction(self.function):
            found = await self.function(**arguments)
        else:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self.threads, lambda: self.function(**arguments))
        return as_result(found)


@dataclass(slots=True, kw_only=True)
class ProgramAgent:
    """Runs `command` with the row on its standard input, as a process or in a sandbox of its own.  All that it has started ends
    with the episode."""

    command: Sequence[str]
    reads_reward: bool
    sandboxes: SandboxProvider | None = None

    async def __call__(self, base_url: str, api_key: str, row: Mapping[str, Any]) -> AgentResult:
        stdin = json.dumps(dict(row), default=plain).encode()
        if self.sandboxes is None:
            status, out, err = await self._as_process(stdin, _addresses(base_url, api_key))
        else:
            status, out, err = await self._in_sandbox(self.sandboxes, stdin, base_url, api_key)
        if status != 0:
            told = err.decode(errors="replace")[-SHOWN:]
            raise WorkflowError(f"the agent {self.command[1]} ended with status {status}: {told}")
        lines = out.decode(errors="replace").strip().splitlines()
        return as_result(lines[-1] if lines and self.reads_reward else None)

    async def _as_process(self, stdin: bytes, variables: Mapping[str, str]) -> tuple[int | None, bytes, bytes]:
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **variables},
            start_new_session=True,
        )
        try:
            out, err = await process.communicate(stdin)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, out, err

    async def _in_sandbox(
        self, sandboxes: SandboxProvider, stdin: bytes, base_url: str, api_key: str
    ) -> tuple[int, bytes, bytes]:
        """Runs the program where of all addresses it can reach only the endpoint's."""
        url = urlsplit(base_url)
        assert url.hostname is not None and url.port is not None, base_url
        inside = url._replace(netloc=f"127.0.0.1:{url.port}").geturl()
        async with await sandboxes.open() as sandbox:
            command = [sandboxes.python, *self.command[1:]]
            found = await sandbox.exec(
                command, stdin, given=Given(env=_addresses(inside, api_key), reach=(url.hostname, url.port))
            )
        why = f"ended by its sandbox for its limit on {found.ended}\n" if found.ended else ""
        return found.code or int(bool(why)), found.stdout, why.encode() + found.stderr


def _addresses(base_url: str, api_key: str) -> dict[str, str]:
    """Returns the variables in which the clients of OpenAI and Anthropic find the endpoint; the latter's path has its own /v1."""
    anthropic = {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key}
    return {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, **anthropic}


def load_agent(knobs: AgentKnobs, threads: ThreadPoolExecutor, *, reads_reward: bool) -> Agent:
    """Returns the agent of `path/to/script.py`, or of a function `path/to/file.py:name` or `module:name`.  Raises ConfigError if
    there is none."""
    target = knobs.agent
    if target.endswith(".py"):
        return _load_program(knobs, reads_reward=reads_reward)
    if knobs.sandbox is not None:
        raise ConfigError(
            f"agent.kwargs.sandbox={knobs.sandbox}: {target} is a function, which runs in this process; name a program "
            "(agent=path/to/script.py), or open sandboxes in the function (rlhub.sandboxes.registry:load_sandbox)"
        )
    try:
        function = load_target(target)
    except LoadError as error:
        raise ConfigError(f"agent: {error}") from error
    if not callable(function):
        raise ConfigError(f"agent: {target} is a {type(function).__name__}; expected a function run(base_url, api_key, row)")
    return FunctionAgent(function=function, threads=threads)


def _load_program(knobs: AgentKnobs, *, reads_reward: bool) -> ProgramAgent:
    script = Path(knobs.agent).expanduser().resolve()
    if not script.is_file():
        raise ConfigError(f"agent: no such file: {script}")
    sandboxes = None
    if knobs.sandbox is not None:
        sandboxes = load_sandbox(knobs.sandbox, where="agent.kwargs.sandbox", **AGENT_LIMITS)
        sandboxes.read_only = [*sandboxes.read_only, str(script.parent)]
    command = [sys.executable, str(script), *knobs.args]
    return ProgramAgent(command=command, reads_reward=reads_reward, sandboxes=sandboxes)


def as_result(value: Any) -> AgentResult:
    """Returns the result of a number, of {"reward": number}, of {"rewards": {name: number}}, each with
    {"metrics": {name: number}} or without, or of text that is one of them; without a reward for None.

    Raises WorkflowError for anything else.
    """
    try:
        given = json.loads(value) if isinstance(value, str) and value.lstrip().startswith("{") else value
        told = given if isinstance(given, Mapping) else {"reward": given}
        metrics = _numbers(told.get("metrics") or {})
        if "rewards" in told:
            return AgentResult(reward=_numbers(told["rewards"]), metrics=metrics)
        reward = told.get("reward")
        return AgentResult(reward=None if reward is None else float(reward), metrics=metrics)
    except (TypeError, ValueError, AttributeError):
        raise WorkflowError(f"the agent returned {value!r:.200}; expected a number, or nothing") from None


def _numbers(given: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(number) for name, number in given.items()}
