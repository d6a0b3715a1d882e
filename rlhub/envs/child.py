"""What runs in a pool's process: one simulator, called by name.  Loaded by utils/children/child.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np

from rlhub.envs.base import EnvError, ImageObservation, Observation, StepEnvironment
from rlhub.envs.local import observed, optional_method
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.utils.children.wire import WireError, encode
from rlhub.utils.user_code import load_target

_held: list[Any] = []  # the process's simulator, once made


def serve(operation: str, arguments: dict[str, Any]) -> Any:
    """make(target, settings), reset(seed, options), step(action), get_state(), load_state(state), close()."""
    if operation == "make":
        _held.append(_made(load_target(arguments["target"]), arguments["settings"]))
        return None
    simulator = _held[-1]
    if operation == "reset":
        observation, info = _result(simulator.reset(**arguments))
        return [packed(observed(observation)), plain(info)]
    if operation == "step":
        observation, reward, terminated, truncated, info = _result(simulator.step(arguments["action"]))
        return [packed(observed(observation)), float(reward), bool(terminated), bool(truncated), plain(info)]
    if operation == "close":
        return _result(simulator.close())
    return _result(optional_method(simulator, operation)(**arguments))


@cache
def _loop() -> LoopThread:
    """Of a StepEnvironment, whose methods are coroutines."""
    return LoopThread("env-loop")


def _made(factory: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """The simulator; a StepEnvironment is made on its event loop, as elsewhere."""
    if not (isinstance(factory, type) and issubclass(factory, StepEnvironment)):
        return factory(**settings)

    async def make() -> StepEnvironment:
        return factory(**settings)

    return _loop().run(make())


def _result(value: Any) -> Any:
    return _loop().run(value) if inspect.iscoroutine(value) else value


def packed(observation: Observation) -> Any:
    """An image as its bytes and shape."""
    if isinstance(observation, str):
        return observation
    pixels = np.ascontiguousarray(observation.pixels, dtype=np.uint8)
    return {"pixels": pixels.tobytes(), "shape": list(pixels.shape), "text": observation.text}


def unpacked(value: Any) -> Observation:
    """The inverse of `packed`; EnvError for anything else."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not isinstance(value.get("pixels"), bytes):
        raise EnvError(f"the environment's process sent no observation but {value!r:.80}")
    pixels = np.frombuffer(value["pixels"], dtype=np.uint8).reshape(value["shape"])
    return ImageObservation(pixels=pixels, text=str(value["text"]))


def plain(info: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that have a JSON form: simulators put all sorts of objects there."""
    kept = {}
    for key, value in info.items():
        try:
            encode(value)
        except WireError:
            continue
        kept[str(key)] = value
    return kept
