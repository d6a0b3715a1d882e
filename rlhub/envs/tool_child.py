"""What runs in a pool's process: a tool environment, made anew for each episode, called by name.  Loaded by
utils/children/child.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rlhub.envs.base import EnvError, Environment
from rlhub.errors import RlhubError
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.utils.tool_calls import ToolResult, as_result
from rlhub.utils.user_code import load_target

TIMED_OUT = "timed_out"


class _Place:
    """Makes environments and holds the one of this episode.  The loop runs between calls too, as in any other place."""

    def __init__(self, factory: Callable[[], Environment]) -> None:
        self._factory = factory
        self._environment: Environment | None = None
        self._loop = LoopThread("env-loop")
        self._loop.run(self._made())  # what cannot be made is known at once

    def serve(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        return self._loop.run(self._serve(operation, arguments))

    async def _made(self) -> Environment:
        if self._environment is None:
            self._environment = self._factory()
        return self._environment

    async def _serve(self, operation: str, arguments: Mapping[str, Any]) -> Any:
        environment = await self._made()
        match operation:
            case "ainitialize":
                return await environment.ainitialize(**arguments)
            case "list_tools":
                return await environment.list_tools()
            case "aexecute":
                return await _answer(environment, **arguments)
            case "aclose":
                self._environment = None
                return await environment.aclose()
        raise EnvError(f"{type(environment).__name__} offers tools and has no {operation}")


_held: list[_Place] = []  # the process's, once made


def serve(operation: str, arguments: dict[str, Any]) -> Any:
    """make(target, settings), ainitialize(seed, options), list_tools(), aexecute(tool_name, tool_args), aclose()."""
    if operation == "make":
        _held.append(_Place(partial(load_target(arguments["target"]), **arguments["settings"])))
        return None
    return _held[-1].serve(operation, arguments)


async def _answer(environment: Environment, tool_name: str, tool_args: Mapping[str, Any]) -> dict[str, Any]:
    """A result's fields.  What the call raises is the policy's to read, as text, for its type is known here."""
    try:
        made = as_result(await environment.aexecute(tool_name, tool_args))
    except MemoryError:
        raise
    except TimeoutError as error:
        return {TIMED_OUT: str(error)}
    except RlhubError as error:
        made = ToolResult(text=f"Error: {error}", failed=True)
    except Exception as error:  # noqa: BLE001  boundary to code of the user's
        made = ToolResult(text=f"Error: {type(error).__name__}: {error}", failed=True)
    shown = {"text": made.text, "failed": made.failed}
    return shown | {"reward": float(made.reward), "done": bool(made.done), "metrics": dict(made.metrics)}
