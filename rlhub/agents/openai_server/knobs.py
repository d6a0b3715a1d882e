"""The openai_agent workflow's own settings (actor_rollout_ref.rollout.agent.kwargs); loads nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.agents.workflows.knobs import at_least
from rlhub.config.sections.rollout import MultiTurnConfig


@dataclass(slots=True, kw_only=True)
class AgentKnobs:
    """Which agent runs, and how it reaches the policy."""

    agent: str = ""
    """The agent: path/to/agent.py:run or package.module:run, a function; or path/to/script.py, a program. Required."""
    args: list[str] = field(default_factory=list)
    """Command-line arguments of a program."""
    reward: Literal["score", "agent"] = "score"
    """score: the run's reward function scores the last segment's text; agent: what the function returns, or the last line that
    the program prints, is the reward."""
    segment: Literal["last", "longest", "random"] = "last"
    """What trains of an agent that had several conversations, or that changed its history: the one of its last request, that
    with the most tokens, or any of them, each as likely, so that over many episodes all of them train. random is for an agent
    that shortens its history or has helpers, and whose own reward is that of the whole episode (reward=agent)."""
    format: str = field(default_factory=lambda: MultiTurnConfig().format)
    """How tool calls stand in the policy's text; a registered format."""
    model: str = "policy"
    """Name under which the policy is served; agents may ask for any."""
    host: str = "127.0.0.1"
    """Address the endpoint listens on. Another than loopback lets other machines in, with their session's key."""
    port: int = 0
    """Its port; 0: a free one. Every process of rollout.agent.num_workers and validation have endpoints of their own: of those
with a port that is set, each takes the first free one of the 64 from there on."""
    max_concurrent: int = 4096
    """Most requests answered at once; more are told to come back (429)."""
    max_agents: int = 64
    """Agents that run at once in a process; more wait for their turn. OpenAI's client gives up a connection after 5 seconds, and
    the agents' own code shares one event loop with the endpoint."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""

    def __post_init__(self) -> None:
        at_least(1, max_concurrent=self.max_concurrent, max_agents=self.max_agents)
        at_least(0, port=self.port)
        for name, known in (("reward", ("score", "agent")), ("segment", ("last", "longest", "random"))):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(known)}")
        if self.segment == "random" and self.reward != "agent":
            raise ValueError(
                f"segment=random with reward={self.reward}: a conversation alone does not show how the episode ended; let the "
                "agent give its reward (reward=agent), or set segment=last"
            )
