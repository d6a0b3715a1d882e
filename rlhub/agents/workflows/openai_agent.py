"""openai_agent: an existing agent, written with OpenAI's client, as an episode.

Each episode gets a session of its own at an endpoint on the event loop of the episodes, and runs the agent with the session's
address and key.  What the policy wrote for it is recorded there as tokens; a history that the agent changes starts a new
segment.  One segment is the episode's trajectory.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from rlhub.agents.openai_server.agents import load_agent
from rlhub.agents.openai_server.knobs import AgentKnobs
from rlhub.agents.openai_server.server import OpenAIServer, ServerOptions
from rlhub.agents.openai_server.sessions import Limits, Session
from rlhub.agents.trajectory import Trajectory
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, RolloutWorkflow, WorkflowParts
from rlhub.agents.workflows.load import fill_knobs
from rlhub.errors import ConfigError, WorkflowError
from rlhub.tools.registry import TOOL_FORMATS
from rlhub.utils.outcomes import Reject

MAX_ENDPOINTS = 64
"""Ports tried from a given one on: each process of rollout.agent.num_workers has an endpoint, and validation has its own."""
CLIENT_LOGGERS = ("httpx", "httpx2")
"""OpenAI's client logs a line for every request, at the level at which a run reports its steps."""


class OpenAIAgent(RolloutWorkflow):
    """See AgentKnobs."""

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
        self._limits = Limits(prompt=parts.max_prompt_length, response=parts.max_response_length)
        self._server: OpenAIServer | None = None
        self._starting = asyncio.Lock()
        self._places = asyncio.Semaphore(self.knobs.max_agents)

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory | None:
        async with self._places:
            return await self._episode(engine, data)

    async def _episode(self, engine: EpisodeEngine, data: EpisodeData) -> Trajectory:
        server = await self._started(engine)
        session = server.open_session(data.session, seed=data.seed, limits=self._limits, engine=engine)
        try:
            reward = await self._run(server, session, data)
        finally:
            server.close_session(session)
        made = session.trajectory(self.knobs.segment)
        if made is None:
            raise Reject("the agent asked the policy for nothing")
        if session.full:
            made.finish_reason = "length"
        if self.knobs.reward == "agent":
            if reward is None:
                raise WorkflowError(f"the agent {self.knobs.agent} gave no reward; return a number, or set reward=score")
            made.set_reward(reward)
        return made

    async def _run(self, server: OpenAIServer, session: Session, data: EpisodeData) -> float | None:
        """The agent's own reward, if it gives one.  An agent that fails because its conversation is full has ended."""
        try:
            return await self._agent(server.base_url(session), session.token, data.row)
        except Exception:  # boundary to code of the user's
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
