"""guess_number: find a hidden number by asking; the answers say higher or lower."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from rlhub.envs.base import EnvError, StepResult

_NUMBER = re.compile(r"-?\d+")


class GuessNumber:
    """The number is drawn from 1 to `largest`.  Reward 1 for it, 0 for anything else; after `max_steps` guesses it is over."""

    def __init__(self, *, largest: int = 20, max_steps: int = 8) -> None:
        self._largest, self._max_steps = largest, max_steps
        self._number = 0
        self._steps = 0

    def reset(self, *, seed: int | None, options: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
        """options: `number` to hide a certain one."""
        self._number = int((options or {}).get("number", random.Random(seed).randint(1, self._largest)))
        self._steps = 0
        return f"I think of a number from 1 to {self._largest}. What is it?", {}

    def step(self, action: str) -> StepResult:
        """The last number in the text is the guess."""
        if not self._number:
            raise EnvError("step before reset")
        self._steps += 1
        over = self._steps >= self._max_steps
        found = _NUMBER.findall(str(action)[-1000:])
        if not found:
            return "Say a number.", 0.0, False, over, {}
        guess = int(found[-1])
        if guess == self._number:
            return f"{guess} is right.", 1.0, True, False, {}
        return f"It is {'higher' if guess < self._number else 'lower'} than {guess}.", 0.0, False, over, {}

    def get_state(self) -> dict[str, int]:
        return {"number": self._number, "steps": self._steps}

    def load_state(self, state: Mapping[str, int]) -> None:
        self._number, self._steps = int(state["number"]), int(state["steps"])

    def close(self) -> None:
        self._number = 0
