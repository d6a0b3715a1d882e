"""The program of an environment's process: it runs a simulator, one tool environment after the other, or environments in
lock-step, and calls their methods by name.

utils/children/child.py loads `serve` and calls it for every request of an EnvironmentProcess (process.py).  Requests and replies
are JSON, so this module also converts observations and tool results to JSON and back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

import numpy as np

from rlhub.envs.base import EnvError, Environment, ImageObservation, Observation, StepEnvironment
from rlhub.envs.local import observed, optional_method
from rlhub.envs.vector.segment import ServedVector
from rlhub.errors import RlhubError
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.utils.children.wire import WireError, encode
from rlhub.utils.tool_calls import ToolResult, as_result
from rlhub.utils.user_code import load_target

TIMED_OUT = "timed_out"


class _Served(Protocol):
    def call(self, method: str, arguments: Mapping[str, Any]) -> Any: ...


_served: list[_Served] = []  # the process's only one, once `make` has been called


def serve(operation: str, arguments: dict[str, Any]) -> Any:
    """Executes an operation: "make" builds the environment from kind (tools, simulator or vector), target and settings; every
    other one is a method of it.  "make" returns the spec of environments in lock-step (kind vector), otherwise None."""
    if operation == "make":
        return _make_served(**arguments)
    return _served[-1].call(operation, arguments)


def _make_served(kind: str, target: str, settings: Mapping[str, Any], **vector: Any) -> Any:
    if kind == "vector":
        served = ServedVector(target, settings, **vector)
        _served.append(served)
        return served.spec
    serving = _ServedTools if kind == "tools" else _ServedSimulator
    _served.append(serving(load_target(target), settings))
    return None


@cache
def _loop() -> LoopThread:
    """Returns the event loop for the coroutines of environments; it also runs between calls."""
    return LoopThread("env-loop")


class _ServedSimulator:
    """Serves one simulator, with plain methods or as a StepEnvironment.  It is built once and lives as long as the process."""

    def __init__(self, factory: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        is_async = isinstance(factory, type) and issubclass(factory, StepEnvironment)
        self._simulator = _loop().run(_make(factory, settings)) if is_async else factory(**settings)

    def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls reset(seed, options), step(action), get_state(), load_state(state) or close()."""
        simulator = self._simulator
        if method == "reset":
            observation, info = _result(simulator.reset(**arguments))
            return [packed(observed(observation)), plain(info)]
        if method == "step":
            observation, reward, terminated, truncated, info = _result(simulator.step(arguments["action"]))
            return [packed(observed(observation)), float(reward), bool(terminated), bool(truncated), plain(info)]
        if method == "close":
            return _result(simulator.close())
        return _result(optional_method(simulator, method)(**arguments))


class _ServedTools:
    """Serves tool environments, a new one for every episode."""

    def __init__(self, factory: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        self._factory, self._settings = factory, settings
        # The first is made at once: an environment that cannot be made is an error of the start.
        self._environment: Environment | None = _loop().run(_make(factory, settings))

    def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls ainitialize(seed, options), list_tools(), aexecute(tool_name, tool_args) or aclose()."""
        return _loop().run(self._call(method, arguments))

    async def _call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        if self._environment is None:
            self._environment = await _make(self._factory, self._settings)
        environment = self._environment
        match method:
            case "ainitialize":
                return await environment.ainitialize(**arguments)
            case "list_tools":
                return await environment.list_tools()
            case "aexecute":
                return await _execute(environment, **arguments)
            case "aclose":
                self._environment = None
                return await environment.aclose()
        raise EnvError(f"{type(environment).__name__} offers tools and has no {method}")


async def _make(factory: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """Builds an asynchronous environment on the event loop on which it will run."""
    return factory(**settings)


def _result(value: Any) -> Any:
    return _loop().run(value) if inspect.iscoroutine(value) else value


async def _execute(environment: Environment, tool_name: str, tool_args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a tool result.  An error of the call becomes text for the policy here, where its type is known."""
    try:
        result = as_result(await environment.aexecute(tool_name, tool_args))
    except MemoryError:
        raise
    except TimeoutError as error:
        return {TIMED_OUT: str(error)}
    except RlhubError as error:
        result = ToolResult(text=f"Error: {error}", failed=True)
    except Exception as error:  # noqa: BLE001  boundary to the user's code
        result = ToolResult(text=f"Error: {type(error).__name__}: {error}", failed=True)
    text = {"text": result.text, "failed": result.failed}
    return text | {"reward": float(result.reward), "done": bool(result.done), "metrics": dict(result.metrics)}


def decoded(method: str, value: Any) -> Any:
    """Returns the result of a method from its JSON form.  Raises EnvError for an invalid one, and TimeoutError if the tool raised
    it."""
    if method in ("reset", "step"):
        observation, *others = value
        return (unpacked(observation), *others)
    if method != "aexecute":
        return value
    if TIMED_OUT in value:
        raise TimeoutError(value[TIMED_OUT])
    return ToolResult(**value)


def packed(observation: Observation) -> Any:
    """Returns an observation as text, or as an image's bytes, shape and text."""
    if isinstance(observation, str):
        return observation
    pixels = np.ascontiguousarray(observation.pixels, dtype=np.uint8)
    return {"pixels": pixels.tobytes(), "shape": list(pixels.shape), "text": observation.text}


def unpacked(value: Any) -> Observation:
    """Returns the observation that `packed` encoded.  Raises EnvError for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("pixels"), bytes):
        raise EnvError(f"the environment's process sent no observation but {value!r:.80}")
    pixels = np.frombuffer(value["pixels"], dtype=np.uint8).reshape(value["shape"])
    return ImageObservation(pixels=pixels, text=str(value["text"]))


def plain(info: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries that have a JSON form; simulators may put any objects into their info."""
    entries = {}
    for key, value in info.items():
        try:
            encode(value)
        except WireError:
            continue
        entries[str(key)] = value
    return entries
