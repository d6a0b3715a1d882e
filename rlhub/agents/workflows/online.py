"""online: episodes that an application drives over HTTP.

The run starts no agents.  An application takes an episode with POST /sessions, asks the policy at the session's own address with
any client of OpenAI's interface, gives a reward and ends the session; see rlhub/agents/openai_server/online.py.  An episode waits
for an application without a time limit, because the run cannot know when it has work.
"""

from __future__ import annotations

import asyncio
import logging

from rlhub.agents.openai_server.online import OnlineOptions, OnlineSessions
from rlhub.agents.openai_server.server import OpenAIServer
from rlhub.agents.openai_server.sessions import SessionLimits
from rlhub.agents.trajectory import Sampled, rows_of
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine, WorkflowParts
from rlhub.agents.workflows.knobs import OnlineKnobs
from rlhub.agents.workflows.openai_agent import EndpointWorkflow
from rlhub.agents.workflows.registry import fill_knobs
from rlhub.errors import ConfigError, WorkflowError

logger = logging.getLogger(__name__)
PORT_TRIES, PORT_S = 30, 1.0
"""Attempts to listen, and seconds between two: processes of a run that was killed give its port back as they end."""


class OnlineEpisodes(EndpointWorkflow):
    """Lets applications run the episodes; see OnlineKnobs for its settings."""

    keeps_time = True

    def __init__(self, parts: WorkflowParts) -> None:
        knobs = fill_knobs(OnlineKnobs, parts.kwargs)
        options = OnlineOptions(
            key=knobs.read_key(),
            model=knobs.model,
            limits=SessionLimits(prompt=parts.max_prompt_length, response=parts.max_response_length),
            roles=knobs.roles,
            timeout_s=knobs.session_timeout_s,
            needs_reward=knobs.reward == "agent",
        )
        self._sessions = OnlineSessions(options)
        self._waiting = asyncio.Lock()
        super().__init__(parts, knobs, "the application", self._sessions)

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Sampled | None:
        await self.started(engine)
        online = await self._sessions.run(engine, data)
        made = self.sampled(online.session, online.reward)
        if made is None:
            raise WorkflowError(f"session {online.session.name} sampled nothing that trains")
        for row in rows_of(made):  # samples of other groups may complete a group after a restart
            row.comparison = "/".join(filter(None, (online.group, row.comparison)))
        online.session.forget()  # the session is remembered for repeated requests, without its tokens
        return made

    async def started(self, engine: EpisodeEngine) -> OpenAIServer:
        """Returns the endpoint; waits for its port."""
        async with self._waiting:
            for _ in range(PORT_TRIES):
                try:
                    return await super().started(engine)
                except ConfigError as error:
                    logger.warning("online sessions wait for their port: %s", error)
                    await asyncio.sleep(PORT_S)
            return await super().started(engine)
