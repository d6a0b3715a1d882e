"""The two kinds of environment.

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
    """pixels: (height, width, channels) uint8.  text: what goes with it; policies without eyes read only this."""

    pixels: np.ndarray
    text: str = ""


Observation = str | ImageObservation
StepResult = tuple[Observation, float, bool, bool, dict[str, Any]]
"""(observation, reward, terminated, truncated, info)."""


class Environment(ABC):
    """Tools with a state behind them.  Deadlines are the caller's.

    It runs on an event loop with others, or on one of its own in a pool of processes: only there can a call that hangs be ended.
    """

    async def ainitialize(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> None:  # noqa: B027
        """Make ready for one episode; called once, before the rest."""

    @abstractmethod
    async def list_tools(self) -> list[ToolSchema]:
        """The tools as chat templates describe them."""

    @abstractmethod
    async def aexecute(self, tool_name: str, tool_args: Mapping[str, Any]) -> ToolResult | str:
        """One call.  Whatever it raises becomes text for the policy; `done` in the result ends the episode."""

    async def aclose(self) -> None:  # noqa: B027
        """Release everything.  Called however the episode ends, once."""


class StepEnvironment(ABC):
    """gymnasium's semantics: `reset` begins an episode, `step` goes on until terminated or truncated, then `reset` again."""

    @abstractmethod
    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode; equal seeds and options begin equal ones.  Returns the first observation and what else is known."""

    @abstractmethod
    async def step(self, action: Any) -> StepResult:
        """Act.  terminated: the episode has come to its end; truncated: it was cut off."""

    async def get_state(self) -> Any:
        """The whole state as JSON-able values.  EnvError if the environment cannot say it."""
        raise EnvError(f"{type(self).__name__} cannot save its state: it has no get_state")

    async def load_state(self, state: Any) -> None:
        """Go on from a state of `get_state`."""
        raise EnvError(f"{type(self).__name__} cannot load a state: it has no load_state")

    @abstractmethod
    async def close(self) -> None:
        """Release everything.  Idempotent."""


class EnvironmentClass(Protocol):
    """A simulator with plain methods, as users write it: the same as StepEnvironment, not asynchronous.

    get_state and load_state are optional; JSON-able values.
    """

    def reset(self, *, seed: int | None, options: Mapping[str, Any] | None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]: ...

    def close(self) -> None: ...
