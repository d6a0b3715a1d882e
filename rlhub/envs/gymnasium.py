"""Environments of gymnasium, for episodes and in lock-step.

GymnasiumEnvironment parses actions from text, and observations become text or images.  GymnasiumSimulator (vector/) takes numbers
and returns pictures and numbers; MiniGrid, BabyAI and MetaWorld are such environments.

They need the extra: pip install 'rlhub[envs]'. gymnasium cannot save a state, so the state here is its history (seed, options,
actions).  Loading replays the history, which is exact if the environment is deterministic for a seed.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from rlhub.envs.base import EnvError, ImageObservation, Observation, StepResult
from rlhub.envs.vector.base import StepOutcome, VectorSpec, render_without_display
from rlhub.errors import LoadError

render_without_display()
try:
    import gymnasium
    from gymnasium.utils import seeding
except ImportError as missing:
    raise LoadError("the gymnasium environments need the package gymnasium: pip install 'rlhub[envs]'") from missing

_NUMBER = re.compile(r"-?\d+")
DIGITS = 4  # of the numbers in a text observation


class GymnasiumEnvironment:
    """An environment of gymnasium as a simulator.  id, make_kwargs: the arguments of gymnasium.make.

    actions: words for the actions of a discrete environment, in their order; without them an action is a number in the text.
    Actions of any other space are JSON. Text that is no action is answered with a note and a reward of `invalid_reward`, without
    a step.  describe: text before the first observation.
    """

    def __init__(
        self,
        *,
        id: str,  # gymnasium's own name for it
        make_kwargs: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        describe: str = "",
        invalid_reward: float = 0.0,
    ) -> None:
        self._env = gymnasium.make(id, **dict(make_kwargs or {}))
        self._actions, self._describe, self._invalid_reward = list(actions), describe, invalid_reward
        self._history: dict[str, Any] = {}
        space = self._env.action_space
        if actions and not (isinstance(space, gymnasium.spaces.Discrete) and int(space.n) == len(actions)):
            raise EnvError(f"{id}: {len(actions)} names of actions, but its action space is {space}")

    def reset(self, *, seed: int | None, options: Mapping[str, Any] | None) -> tuple[Observation, dict[str, Any]]:
        given = None if options is None else dict(options)
        observation, info = self._env.reset(seed=seed, options=given)
        self._history = {"seed": seed, "options": given, "actions": []}
        return shown(observation, self._describe), dict(info)

    def step(self, action: Any) -> StepResult:
        if not self._history:
            raise EnvError("step before reset")
        try:
            read = self._read(action)
        except ValueError as error:
            return f"{error}", self._invalid_reward, False, False, {"invalid_action": True}
        self._history["actions"].append(action)
        observation, reward, terminated, truncated, info = self._env.step(read)
        return shown(observation, ""), float(reward), bool(terminated), bool(truncated), dict(info)

    def _read(self, action: Any) -> Any:
        """Returns the action in the environment's space.  Raises ValueError with a message for the policy."""
        space = self._env.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            number = self._number(action)
            if not space.contains(np.int64(number)):
                first = int(space.start)
                raise ValueError(f"There is no action {number}; actions are {first} to {first + int(space.n) - 1}.")
            return number
        try:
            value = json.loads(action) if isinstance(action, str) else action
            read = np.asarray(value, dtype=space.dtype).reshape(space.shape or ())
        except (TypeError, ValueError) as error:
            raise ValueError(f"The action must be JSON of the shape {space.shape}.") from error
        if not space.contains(read):
            raise ValueError(f"The action is outside {space}.")
        return read

    def _number(self, action: Any) -> int:
        if isinstance(action, int):
            return action
        text, space = str(action)[-1000:], self._env.action_space
        assert isinstance(space, gymnasium.spaces.Discrete)
        if self._actions:
            places = {name: text.lower().rfind(name.lower()) for name in self._actions}
            last = max(places, key=lambda name: places[name])
            if places[last] < 0:
                raise ValueError(f"Say one of {', '.join(self._actions)}.")
            return self._actions.index(last) + int(space.start)
        found = _NUMBER.findall(text)
        if not found:
            raise ValueError("Say the number of an action.")
        return int(found[-1])

    def get_state(self) -> dict[str, Any]:
        return {**self._history, "actions": list(self._history.get("actions", []))}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.reset(seed=state["seed"], options=state["options"])
        for action in state["actions"]:
            self.step(action)

    def close(self) -> None:
        self._env.close()


class GymnasiumSimulator:
    """An environment of gymnasium in lock-step.  id, make_kwargs: the arguments of gymnasium.make.

    imports: modules that register the environment.  pictures: it renders, with the make argument render_mode="rgb_array".
    instruction: a fixed text; without it, the observation's entry "mission" or "instruction".  max_steps: 0 for its own time
    limit.

    The numbers of an action are those of its box; for discrete actions one number, which is rounded.  The state has all numbers
    of the observation except pictures.  Success is the entry "success" of its info, or else a positive reward at the end.
    """

    def __init__(
        self,
        *,
        id: str,
        make_kwargs: Mapping[str, Any] | None = None,
        imports: Sequence[str] = (),
        pictures: bool = True,
        instruction: str = "",
        max_steps: int = 0,
        chunk: int = 1,
    ) -> None:
        for module in imports:
            importlib.import_module(module)
        rendering = {"render_mode": "rgb_array"} if pictures else {}
        self._env = gymnasium.make(id, disable_env_checker=True, **(rendering | dict(make_kwargs or {})))
        self._pictures, self._instruction = pictures, instruction
        self._observation, _ = self._env.reset(seed=0)
        limit = max_steps or (self._env.spec and self._env.spec.max_episode_steps) or 0
        if not limit:
            raise EnvError(f"{id} has no time limit: give max_steps, the number of actions after which an episode is truncated")
        height, width = self._picture().shape[:2] if pictures else (0, 0)
        low, high = _bounds(self._env.action_space)
        self.spec = VectorSpec(
            cameras=("render",) if pictures else (),
            height=height,
            width=width,
            state_dim=len(_numbers(self._observation)),
            action_dim=len(low),
            low=tuple(low),
            high=tuple(high),
            chunk=chunk,
            max_steps=limit,
            language=bool(self._text()),
            state="replay",
        )

    def reset(self, seed: int, initial: int | None) -> str:
        seed %= 2**31  # some environments take no more bits
        self._env.unwrapped.np_random = seeding.np_random(seed)[0]  # some wrappers draw from it before they hand the seed on
        self._observation, _ = self._env.reset(seed=seed)
        return self._text()

    def step(self, action: np.ndarray) -> StepOutcome:
        space = self._env.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            taken: Any = int(space.start) + round(float(action[0]))
        else:
            taken = np.asarray(action, space.dtype).reshape(space.shape or ())
        self._observation, reward, terminated, truncated, info = self._env.step(taken)
        success = bool(info["success"]) if "success" in info else bool(terminated and float(reward) > 0)
        return StepOutcome(
            reward=float(reward), terminated=bool(terminated), truncated=bool(truncated) and not terminated, success=success
        )

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        state[:] = _numbers(self._observation)
        if self._pictures:
            images[0] = self._picture()

    def get_state(self) -> bytes:
        raise EnvError("environments of gymnasium cannot save their state; it is replayed")

    def load_state(self, state: bytes) -> None:
        raise EnvError("environments of gymnasium cannot load a state; it is replayed")

    def close(self) -> None:
        self._env.close()

    def _picture(self) -> np.ndarray:
        rendered = np.asarray(self._env.render())
        if rendered.ndim != 3 or rendered.shape[2] != 3 or rendered.dtype != np.uint8:
            raise EnvError(f"render gives {rendered.dtype} {rendered.shape}, not a picture (height, width, 3) of uint8")
        return rendered

    def _text(self) -> str:
        seen = self._observation if isinstance(self._observation, Mapping) else {}
        return self._instruction or str(seen.get("mission", seen.get("instruction", "")))


def _bounds(space: Any) -> tuple[list[float], list[float]]:
    """Returns the lowest and the highest action; a bound that is infinite is an error."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return [0.0], [float(space.n) - 1]
    if not isinstance(space, gymnasium.spaces.Box) or not space.is_bounded():
        raise EnvError(f"actions are numbers with bounds or a choice, but this environment's are {space}")
    return space.low.ravel().tolist(), space.high.ravel().tolist()


def _numbers(observation: Any) -> np.ndarray:
    """Returns the numbers of an observation as (D,) float32, in the order of its keys; texts and pictures are left out."""
    if isinstance(observation, Mapping):
        parts = [_numbers(observation[key]) for key in sorted(observation)]
        return np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if isinstance(observation, str):
        return np.zeros(0, np.float32)
    array = np.asarray(observation)
    is_picture = array.ndim == 3 or array.dtype.kind not in "fiub"
    return np.zeros(0, np.float32) if is_picture else cast(np.ndarray, array.astype(np.float32).ravel())


def shown(observation: Any, before: str) -> Observation:
    """Returns an image as an ImageObservation, text unchanged, and anything else as compact JSON."""
    if isinstance(observation, np.ndarray) and observation.dtype == np.uint8 and observation.ndim == 3:
        return ImageObservation(pixels=observation, text=before)
    text = observation if isinstance(observation, str) else json.dumps(_listed(observation), separators=(", ", ": "))
    return f"{before}\n{text}" if before else text


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _listed(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _listed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_listed(item) for item in value]
    return round(value, DIGITS) if isinstance(value, float) else value
