"""The own settings of the workflows that come with rlhub (actor_rollout_ref.rollout.agent.kwargs); loads nothing heavy.

A knob with the name of a setting of actor_rollout_ref.rollout.multi_turn takes its value from there where kwargs has none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.config.sections.rollout import MultiTurnConfig


def at_least(least: float, **values: float | None) -> None:
    """ValueError for a value below `least`; None is no value."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < least):
            raise ValueError(f"{name}={value!r}: must be a number, at least {least:g}")


@dataclass(slots=True, kw_only=True)
class TurnKnobs:
    """What every workflow of several turns has."""

    max_assistant_turns: int | None = None
    """Most generations in an episode; None: until the response is full."""
    max_user_turns: int | None = None
    """Most answers of tools, users or environments in an episode; None: no limit of their own."""
    max_turn_tokens: int | None = None
    """Most tokens of one generation; None: what is left of the response."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""

    def __post_init__(self) -> None:
        at_least(1, max_assistant_turns=self.max_assistant_turns, max_turn_tokens=self.max_turn_tokens)
        at_least(0, max_user_turns=self.max_user_turns)

    def may_go_on(self, num_turns: int) -> bool:
        """Whether another answer to the policy, and another turn of it, may follow after `num_turns` of its turns."""
        turns, answers = self.max_assistant_turns, self.max_user_turns
        return (turns is None or num_turns < turns) and (answers is None or num_turns <= answers)


@dataclass(slots=True, kw_only=True)
class ToolKnobs(TurnKnobs):
    """How tools are called."""

    tool_config_path: str | None = None
    """YAML file that lists the tools."""
    tools: list[Any] = field(default_factory=list)
    """Further tools, as entries of that file."""
    format: str = field(default_factory=lambda: MultiTurnConfig().format)
    """How calls stand in the text; a registered format."""
    tool_timeout_s: float = 30.0
    """Seconds for one call; after that the model reads that it was not done."""
    max_tool_response_length: int = 2000
    """Most characters of one result; the middle of longer ones is left out."""
    max_parallel_calls: int = 4
    """Most calls done of one turn; the model is told of the others."""

    def __post_init__(self) -> None:
        super(ToolKnobs, self).__post_init__()
        at_least(1, max_tool_response_length=self.max_tool_response_length, max_parallel_calls=self.max_parallel_calls)
        at_least(0.001, tool_timeout_s=self.tool_timeout_s)


@dataclass(slots=True, kw_only=True)
class MultiTurnKnobs(TurnKnobs):
    """How often and how the policy is asked again."""

    max_assistant_turns: int | None = 3
    """Most answers to a problem."""
    feedback: str = "That is not right. Look for the mistake and answer again."
    """What the policy reads after an answer that was not good enough."""
    good_enough: float = 1.0
    """An answer with this reward ends the episode."""
    turn_discount: float = 0.9
    """The reward is multiplied by this for each answer before the last; 1: retries cost nothing."""

    def __post_init__(self) -> None:
        super(MultiTurnKnobs, self).__post_init__()
        at_least(0, turn_discount=self.turn_discount)
        if not self.feedback:
            raise ValueError("feedback is empty: the policy must read that its answer was not good enough")


@dataclass(slots=True, kw_only=True)
class EnvironmentKnobs(ToolKnobs):
    """Where episodes are played."""

    environment: str = ""
    """A registered name, module:ClassName or path/to/file.py:ClassName."""
    environment_kwargs: dict[str, Any] = field(default_factory=dict)
    """Its settings, given as keywords."""
    num_env_workers: int = 0
    """Processes that run environments, one episode each, in every place that runs them (rollout.agent.num_env_hosts, or the
    episodes' own process); 0: each episode has its own environment there, without a process that could be killed: set it for
    what may hang."""
    reset_timeout_s: float = 60.0
    """Seconds to begin an episode."""
    step_timeout_s: float = 30.0
    """Seconds for a step; for a call of an environment's tool it is tool_timeout_s."""
    env_memory_gb: float = 8.0
    """Address space of one environment process, in GiB."""
    env: list[str] = field(default_factory=list)
    """Environment variables that environment processes may read though their names look like secrets (API_KEY, TOKEN, ...); they
    are started with all others."""

    def __post_init__(self) -> None:
        super(EnvironmentKnobs, self).__post_init__()
        at_least(0, num_env_workers=self.num_env_workers)
        at_least(0.001, reset_timeout_s=self.reset_timeout_s, step_timeout_s=self.step_timeout_s)
        at_least(0.001, env_memory_gb=self.env_memory_gb)


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
