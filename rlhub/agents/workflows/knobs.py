"""The settings of the workflows that come with rlhub (actor_rollout_ref.rollout.agent.kwargs).  Importing this module loads
nothing heavy.

A knob with the name of a setting of actor_rollout_ref.rollout.multi_turn takes its value from there, unless kwargs set it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhub.config.sections.rollout import MultiTurnConfig
from rlhub.errors import ConfigError


def at_least(least: float, **values: float | None) -> None:
    """Raises ValueError for a value below `least` or one that is no number; None is allowed."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < least):
            raise ValueError(f"{name}={value!r}: must be a number, at least {least:g}")


@dataclass(slots=True, kw_only=True)
class TurnKnobs:
    """The settings of every workflow with several turns."""

    max_assistant_turns: int | None = None
    """Maximum number of generations in an episode; None: until the response is full."""
    max_user_turns: int | None = None
    """Maximum number of messages from tools, users or environments in an episode; None: no separate limit."""
    max_turn_tokens: int | None = None
    """Maximum number of tokens of one generation; None: the remaining response budget."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""

    def __post_init__(self) -> None:
        at_least(1, max_assistant_turns=self.max_assistant_turns, max_turn_tokens=self.max_turn_tokens)
        at_least(0, max_user_turns=self.max_user_turns)

    def may_go_on(self, num_turns: int) -> bool:
        """Returns whether another message to the policy, and then another turn of it, may follow its first `num_turns` turns."""
        turns, answers = self.max_assistant_turns, self.max_user_turns
        return (turns is None or num_turns < turns) and (answers is None or num_turns <= answers)


@dataclass(slots=True, kw_only=True)
class ToolKnobs(TurnKnobs):
    """The settings of tool calls."""

    tool_config_path: str | None = None
    """YAML file that lists the tools."""
    tools: list[Any] = field(default_factory=list)
    """Additional tools, in the form of that file's entries."""
    format: str = field(default_factory=lambda: MultiTurnConfig().format)
    """The format of tool calls in the policy's text; a registered tool format, or vllm:<name> for a tool parser of vLLM's."""
    reasoning_parser: str | None = None
    """The name of vLLM's parser that takes the thoughts out of a reply before its calls are looked for (qwen3, deepseek_r1, ...).
    None: calls count wherever they are."""
    tool_timeout_s: float = 30.0
    """Time limit of one call in seconds; when it passes, the model reads an error message."""
    max_tool_response_length: int = 2000
    """Maximum number of characters of one result; the middle of a longer one is left out."""
    max_parallel_calls: int = 4
    """Maximum number of calls that are executed in one turn; the model reads an error message for the others."""

    def __post_init__(self) -> None:
        super(ToolKnobs, self).__post_init__()
        at_least(1, max_tool_response_length=self.max_tool_response_length, max_parallel_calls=self.max_parallel_calls)
        at_least(0.001, tool_timeout_s=self.tool_timeout_s)


@dataclass(slots=True, kw_only=True)
class MultiTurnKnobs(TurnKnobs):
    """The settings of multi_turn: the number of tries, the feedback, and the discount of late answers."""

    max_assistant_turns: int | None = 3
    """Maximum number of answers to a problem."""
    feedback: str = "That is not right. Look for the mistake and answer again."
    """The message that the policy reads after an answer that was not good enough."""
    good_enough: float = 1.0
    """The reward from which on an answer ends the episode."""
    turn_discount: float = 0.9
    """The factor on the reward for each answer before the last one; with 1 retries cost nothing."""

    def __post_init__(self) -> None:
        super(MultiTurnKnobs, self).__post_init__()
        at_least(0, turn_discount=self.turn_discount)
        if not self.feedback:
            raise ValueError("feedback is empty: the policy must read that its answer was not good enough")


@dataclass(slots=True, kw_only=True)
class EnvironmentKnobs(ToolKnobs):
    """The environment of the episodes, and the processes that run it."""

    environment: str = ""
    """A registered name, module:ClassName or path/to/file.py:ClassName."""
    environment_kwargs: dict[str, Any] = field(default_factory=dict)
    """The environment's own settings, passed as keyword arguments."""
    num_env_workers: int = 0
    """Number of killable processes that run environments, one episode each, per actor of rollout.agent.num_env_hosts or, without
    such actors, in the process of the episodes. 0: each episode has its own environment without a process that could be killed;
    set it for environments that may hang."""
    reset_timeout_s: float = 60.0
    """Time limit for the start of an episode, in seconds."""
    step_timeout_s: float = 30.0
    """Time limit of a step in seconds; calls of an environment's tools have tool_timeout_s instead."""
    env_memory_gb: float = 8.0
    """Limit on the address space of one environment process, in GiB."""
    env: list[str] = field(default_factory=list)
    """Environment variables that environment processes receive although their names look like secrets (API_KEY, TOKEN, ...).  All
    other variables are passed on anyway."""

    def __post_init__(self) -> None:
        super(EnvironmentKnobs, self).__post_init__()
        at_least(0, num_env_workers=self.num_env_workers)
        at_least(0.001, reset_timeout_s=self.reset_timeout_s, step_timeout_s=self.step_timeout_s)
        at_least(0.001, env_memory_gb=self.env_memory_gb)


@dataclass(slots=True, kw_only=True)
class EndpointKnobs:
    """The endpoint of an episode's requests, and the training of what was sampled there."""

    reward: Literal["score", "agent"] = "score"
    """score: the run's reward function scores the text of the last segment that trains.  agent: the reward is the number that the
    function returns, or the last line that the program prints; {"rewards": {...}} gives rewards by role or by response."""
    segment: Literal["all", "last", "longest", "random"] = "all"
    """The segments that train if the agent had several conversations or changed its history: all of them, with every answer once,
    or of each episode one: that of its last request, the one with the most tokens, or one drawn uniformly (reward=agent)."""
    roles: dict[str, str] = field(default_factory=dict)
    """The roles of the agent's conversations, each `trained` or `frozen`.  A request belongs to the role that it names as its
    model, and to none if it names another one.  Answers of frozen roles do not train.  Roles need segment=all."""
    turn_discount: float = 1.0
    """The factor on the later answers' rewards in the return of an answer, where the agent gives rewards by response."""
    format: str = field(default_factory=lambda: MultiTurnConfig().format)
    """The format of tool calls in the policy's text; a registered tool format, or vllm:<name> for a tool parser of vLLM's."""
    reasoning_parser: str | None = None
    """The name of vLLM's parser that takes the thoughts out of answers (qwen3, deepseek_r1, ...).  They are returned beside the
    text, and the recorded tokens are those that were sampled.  None: thoughts are text."""
    model: str = "policy"
    """The name under which the endpoint serves the policy; requests may name any model."""
    host: str = "127.0.0.1"
    """The address on which the endpoint listens.  Any address other than loopback lets other machines in, with their session's
    key."""
    port: int = 0
    """The port of the endpoint; 0: any free port.  Each process of rollout.agent.num_workers and validation has its own endpoint;
    with a port set, each takes the first free one of the 64 ports from there on."""
    max_concurrent: int = 4096
    """Maximum number of requests that are answered at the same time; further ones get status 429."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, such as enable_thinking."""

    def __post_init__(self) -> None:
        at_least(1, max_concurrent=self.max_concurrent)
        at_least(0, port=self.port)
        at_least(0, turn_discount=self.turn_discount)
        for name, known in (("reward", ("score", "agent")), ("segment", ("all", "last", "longest", "random"))):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name}={value!r}: must be one of {', '.join(known)}")
        if self.segment == "random" and self.reward != "agent":
            raise ValueError(
                f"segment=random with reward={self.reward}: a conversation alone does not show how the episode ended; let the "
                "agent give its reward (reward=agent), or set segment=last"
            )
        for name, kind in self.roles.items():
            if kind not in ("trained", "frozen"):
                raise ValueError(f"roles.{name}={kind!r}: must be one of trained, frozen")
        if self.roles and self.segment != "all":
            raise ValueError(f"segment={self.segment} with roles: conversations of several roles train whole; set segment=all")


@dataclass(slots=True, kw_only=True)
class AgentKnobs(EndpointKnobs):
    """The agent program or function, and its access to the policy."""

    agent: str = ""
    """The agent, required: a function as path/to/agent.py:run or package.module:run, or a program as path/to/script.py."""
    args: list[str] = field(default_factory=list)
    """Command-line arguments of a program."""
    sandbox: str | dict[str, Any] | None = None
    """The sandbox in which a program runs, with a network that ends at its endpoint: a registered one (bwrap, docker),
    path/to/file.py:Class, or a mapping with `name` and settings.  None: the program has this user's files and network."""
    max_agents: int = 64
    """Maximum number of agents that run at the same time in a process; further ones wait.  OpenAI's client gives up a connection
    after 5 seconds, and the agents' code shares one event loop with the endpoint."""

    def __post_init__(self) -> None:
        super(AgentKnobs, self).__post_init__()
        at_least(1, max_agents=self.max_agents)


@dataclass(slots=True, kw_only=True)
class OnlineKnobs(EndpointKnobs):
    """The sessions that applications open over HTTP, and their access to the policy."""

    reward: Literal["score", "agent"] = "agent"
    """agent: the application gives each session its reward.  score: the run's reward function scores the text of the last segment
    that trains."""
    port: int = 8020
    """The port of the endpoint, which the applications know."""
    key_file: str = ""
    """File with the key with which applications open sessions, required."""
    session_timeout_s: float = 300.0
    """Seconds without a request after which a session has failed, and its place is given again."""

    def __post_init__(self) -> None:
        super(OnlineKnobs, self).__post_init__()
        at_least(1, port=self.port)
        at_least(0.001, session_timeout_s=self.session_timeout_s)

    def read_key(self) -> str:
        """Returns the applications' key.  Raises ConfigError where there is none."""
        if not self.key_file:
            raise ConfigError("key_file is not set: name a file with the key with which applications open sessions")
        file = Path(self.key_file).expanduser()
        key = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        if not key:
            raise ConfigError(f"key_file={self.key_file}: no such file, or an empty one; write a random key to it")
        return key


@dataclass(slots=True, kw_only=True)
class VerifiersKnobs(EndpointKnobs):
    """The environment of the library verifiers and the Python in which it runs."""

    reward: Literal["score", "agent"] = "agent"
    """agent: the reward is the environment's.  score: the run's reward function scores the text of the last segment that
    trains."""
    max_agents: int = 64
    """Maximum number of episodes that run at the same time in a process; further ones wait."""
    verifiers_python: str = ""
    """The Python in which verifiers and the environment are installed, for example .venv-verifiers/bin/python; required."""
    verifiers_path: list[str] = field(default_factory=list)
    """Folders with environments that are not installed in that Python."""
    verifiers_env: dict[str, Any] = field(default_factory=dict)
    """Settings of the environment, as in the [env] block of the library's configuration: {taskset: {...}, agent: {max_turns: 4},
    id: user-sim}.  A role without a harness of its own talks in the environment's process, and programs run as subprocesses."""
    env: list[str] = field(default_factory=list)
    """Environment variables that the environment receives although their names look like secrets (API_KEY, TOKEN, ...), such as a
    judge's key.  All other variables are passed on anyway."""

    def __post_init__(self) -> None:
        super(VerifiersKnobs, self).__post_init__()
        at_least(1, max_agents=self.max_agents)
