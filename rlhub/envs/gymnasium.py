"""Environments of gymnasium: actions are parsed from text, and observations become text or images.

It needs the extra: pip install 'rlhub[envs]'. gymnasium cannot save a state, so the state here is its history (seed, options,
actions).  Loading replays the history, which is exact if the environment is deterministic for a seed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlhub.envs.base import EnvError, ImageObservation, Observation, StepResult
from rlhub.errors import LoadError

try:
    import gymnasium
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
