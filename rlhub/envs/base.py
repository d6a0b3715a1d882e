"""The two kinds of environment, and the limits of their calls.

Environment      offers tools and keeps a state behind them: a file system, a shop, a game with an API.
StepEnvironment  takes actions and gives observations and rewards, as gymnasium's do.

Both are asynchronous, and one instance serves one episode at a time.  A simulator written the usual way, with plain methods,
is an EnvironmentClass: it runs in a thread (local.py) or in a process of a pool (pool.py), and both make a StepEnvironment
of it.  Pools run all three.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rlhub.errors import RlhubError
from rlhub.utils.tool_calls import ToolResult, ToolSchema


class EnvError(RlhubError, RuntimeError):
    """An environment failed, or cannot do what was asked."""


class EnvDiedError(EnvError):
    """The process that ran an environment ended; the pool starts another one.  The episode's state is lost."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ImageObservation:
    """pixels: (height, width, channels) uint8.  text: belongs to the image; a policy that takes no images reads only this."""

    pixels: np.ndarray
    text: str = ""


Observation = str | ImageObservation
StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]
"""(observation, reward, terminated, truncated, info)."""


@dataclass(slots=True, kw_only=True)
class EnvironmentLimits:
    """reset_timeout_s: for a reset, and for all else that is no step.  step_timeout_s: for a step or a tool call.  memory_gb: of
    the process that runs it."""

    reset_timeout_s: float = 60.0
    step_timeout_s: float = 30.0
    memory_gb: float = 8.0

    @property
    def longest_s(self) -> float:
        return max(self.reset_timeout_s, self.step_timeout_s)

    def timeout_s(self, method: str) -> float:
        """Returns the seconds that a call of this method may take."""
        return self.step_timeout_s if method in ("step", "aexecute") else self.reset_timeout_s


class Environment(ABC):
    """Tools with a state behind them.  Deadlines are the caller's.

    It runs on an event loop with others, or on one of its own in a pool of processes: only there can a call that hangs be ended.
    """

    async def ainitialize(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:  # noqa: B027
        """Prepares one episode; called once, before the other methods."""

    @abstractmethod
    async def list_tools(self) -> list[ToolSchema]:
        """Returns the tools as chat templates describe them."""

    @abstractmethod
    async def aexecute(self, tool_name: str, tool_args: Mapping[str, Any]) -> ToolResult | str:
        """Executes one call.  Whatever it raises becomes text for the policy; `done` in the result ends the episode."""

    async def aclose(self) -> None:  # noqa: B027
        """Releases everything.  Called once, however the episode ends."""


class StepEnvironment(ABC):
    """gymnasium's semantics: `reset` begins an episode, `step` goes on until terminated or truncated, then `reset` again."""

    @abstractmethod
    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins an episode; equal seeds and options begin equal ones.  Returns the first observation and an info."""

    @abstractmethod
    async def step(self, action: Any) -> StepResult:
        """Takes an action.  terminated: the episode has come to its end; truncated: it was cut off."""

    async def get_state(self) -> Any:
        """Returns the whole state as JSON-able values.  EnvError if the environment cannot save it."""
        raise EnvError(f"{type(self).__name__} cannot save its state: it has no get_state")

    async def load_state(self, state: Any) -> None:
        """Continues from a state of `get_state`."""
        raise EnvError(f"{type(self).__name__} cannot load a state: it has no load_state")

    @abstractmethod
    async def close(self) -> None:
        """Releases everything.  Idempotent."""


class EnvironmentClass(Protocol):
    """A simulator with plain methods, as users write it: the same as StepEnvironment, not asynchronous.

    get_state and load_state are optional; JSON-able values.
    """

    def reset(self, *, seed: int | None, options: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]: ...

    def close(self) -> None: ...
