"""EnvironmentActor: runs environments for episodes of other processes, as the object of an AsyncActor on any machine of the
cluster.

Simulators and tool environments stay in killable processes of its own (the pool's), with their deadlines and memory limits, where
`num_env_workers` is set; others run on its event loop.  One loop serves all leases at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhub.envs.base import EnvError
from rlhub.envs.child import plain
from rlhub.envs.source import EnvironmentSpec, LeaseTable, LocalEnvironmentSource
from rlhub.errors import RlhubError
from rlhub.utils.tool_calls import ToolResult

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True, frozen=True)
class EnvironmentActorStatus:
    """The state of an environment actor.

    alive: processes that are up.  leased: environments that episodes hold.  replaced: processes that came after one that died.
    calls: of environments' methods, since the start.
    """

    alive: int
    leased: int
    replaced: int
    calls: int


class EnvironmentActor:
    """See the module docstring.  Callers choose the numbers of their leases.

    folder: the driver's working directory, from which relative paths count; where there is no such folder, as on a machine
    without a common file system, the process stays where it is.
    """

    def __init__(self, folder: str = "") -> None:
        if folder and os.getcwd() != folder and Path(folder).is_dir():
            os.chdir(folder)
        self._own = LocalEnvironmentSource()
        self._leases = LeaseTable(self._own)
        self._seconds: dict[int, float] = {}

    async def lease(self, number: int, spec: EnvironmentSpec, session: str) -> None:
        """Lends an environment to an episode; waits while all are taken.  LoadError if it cannot be made."""
        await self._leases.open(number, spec, session)
        self._seconds[number] = spec.limits.longest_s

    async def call(self, number: int, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls a method of the leased environment by name: reset, step, get_state, load_state, ainitialize, list_tools or
        aexecute."""
        try:
            return _portable(method, await self._leases.call(number, method, arguments))
        except (RlhubError, TimeoutError):
            raise
        except Exception as error:
            if method != "aexecute":
                raise EnvError(f"{method}: {type(error).__name__}: {error}") from error
            # As text here, for its type is known here: its fault is the policy's to read.
            return ToolResult(text=f"Error: {type(error).__name__}: {error}", failed=True)

    async def release(self, number: int) -> None:
        """Takes the environment back.  What its own end raises, or does not do in time, is logged here."""
        seconds = self._seconds.pop(number, None)
        try:
            async with asyncio.timeout(seconds):
                await self._leases.release(number)
        except TimeoutError:
            logger.warning("an environment did not close within %g s; it is left alone", seconds or 0.0)
        except Exception:  # boundary to code of the user's: nobody waits for the result
            logger.warning("an environment could not be closed", exc_info=True)

    async def get_state(self, spec: EnvironmentSpec) -> list[Any]:
        """Returns the states of the pool's simulators, None where none runs.  No call may be in progress."""
        return await self._own.pool(spec).get_state()

    async def load_state(self, spec: EnvironmentSpec, states: list[Any]) -> None:
        """Restores the states that `get_state` gave."""
        await self._own.pool(spec).load_state(states)

    async def status(self) -> EnvironmentActorStatus:
        """Returns what runs here now."""
        return EnvironmentActorStatus(
            alive=sum(pool.num_alive for pool in self._own.pools),
            leased=len(self._leases),
            replaced=sum(pool.num_replaced for pool in self._own.pools),
            calls=self._leases.calls,
        )

    async def close(self) -> None:
        """Takes all environments back and ends all processes."""
        await self._leases.release_all()
        await self._own.aclose()


def _portable(method: str, value: Any) -> Any:
    """Returns a result as it can travel: of an environment's info only what has a plain form."""
    if method not in ("reset", "step"):
        return value
    *found, info = value
    return (*found, plain(info) if info else info)
