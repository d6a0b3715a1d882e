"""The two kinds of environment, and the limits of their calls.

    Environment      offers tools that share a state: a file system, a shop, a game with an API.
    StepEnvironment  takes actions and returns observations and rewards, as gymnasium's environments do.

Both are asynchronous, and one instance serves one episode at a time.  A simulator in the usual form, with plain methods, is an
EnvironmentClass: it runs in a thread (local.py) or in a process of a pool (source.py), and both make a StepEnvironment of it.
Pools run all three.
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
    """An environment failed or does not support what was called."""


class EnvDiedError(EnvError):
    """The process that ran an environment has ended, and the episode's state is lost.  The pool starts another process."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ImageObservation:
    """An image.  pixels: (height, width, channels) uint8.  text: a description; a policy that takes no images reads only this."""

    pixels: np.ndarray
    text: str = ""


Observation = str | ImageObservation
StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]
"""(observation, reward, terminated, truncated, info), as in gymnasium."""


@dataclass(slots=True, kw_only=True)
class EnvironmentLimits:
    """The limits of an environment.

    reset_timeout_s: time limit of all calls except steps.  step_timeout_s: time limit of a step or a tool call.  memory_gb:
    address space of its process, in GiB.
    """

    reset_timeout_s: float = 60.0
    step_timeout_s: float = 30.0
    memory_gb: float = 8.0

    @property
    def longest_s(self) -> float:
        """Returns the longer of the two time limits."""
        return max(self.reset_timeout_s, self.step_timeout_s)

    def timeout_s(self, method: str) -> float:
        """Returns the time limit of this method in seconds."""
        return self.step_timeout_s if method in ("step", "aexecute") else self.reset_timeout_s


class Environment(ABC):
    """Tools that share a state.  Deadlines belong to the caller.

    It runs on an event loop with other environments, or in a process of a pool; only in the latter can a call that hangs be
    ended.
    """

    async def ainitialize(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:  # noqa: B027
        """Prepares one episode.  It is called once, before the other methods."""

    @abstractmethod
    async def list_tools(self) -> list[ToolSchema]:
        """Returns the schemas by which chat templates describe the tools."""

    @abstractmethod
    async def aexecute(self, tool_name: str, tool_args: Mapping[str, Any]) -> ToolResult | str:
        """Executes one call.  An exception becomes text for the policy; `done` in the result ends the episode."""

    async def aclose(self) -> None:  # noqa: B027
        """Releases all resources.  It is called once, however the episode ends."""


class StepEnvironment(ABC):
    """An environment with gymnasium's semantics: `reset` begins an episode, and `step` continues it until terminated or
    truncated."""

    @abstractmethod
    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins an episode; equal seeds and options begin equal episodes.  Returns the first observation and an info."""

    @abstractmethod
    async def step(self, action: Any) -> StepResult:
        """Takes an action.  terminated: the episode has reached its end.  truncated: it was cut off."""

    async def get_state(self) -> Any:
        """Returns the whole state as JSON-able values.  Raises EnvError if the environment cannot save it."""
        raise EnvError(f"{type(self).__name__} cannot save its state: it has no get_state")

    async def load_state(self, state: Any) -> None:
        """Continues from a state that `get_state` returned."""
        raise EnvError(f"{type(self).__name__} cannot load a state: it has no load_state")

    @abstractmethod
    async def close(self) -> None:
        """Releases all resources.  Idempotent."""


class EnvironmentClass(Protocol):
    """A simulator with plain methods, as users write it: a StepEnvironment that is not asynchronous.

    The methods get_state and load_state, with JSON-able values, are optional.
    """

    def reset(self, *, seed: int | None, options: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]: ...

    def close(self) -> None: ...
