"""Two small games, as plain simulators.

guess_number   the policy finds a hidden number; the answers say higher or lower.
grid_walk      the policy walks to a goal on a grid, described in words or, with `images`, as an image.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhub.envs.base import EnvError, ImageObservation, Observation, StepResult

_NUMBER = re.compile(r"-?\d+")
MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
_MOVE = re.compile("|".join(MOVES))
PIXELS = 8  # of a cell's side


class GuessNumber:
    """The policy guesses a number from 1 to `largest`.  The right number gives reward 1; after `max_steps` guesses the game is
    truncated."""

    def __init__(self, *, largest: int = 20, max_steps: int = 8) -> None:
        self._largest, self._max_steps = largest, max_steps
        self._number = 0
        self._steps = 0

    def reset(self, *, seed: int | None, options: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
        """Begins a game.  options: `number` sets the hidden number."""
        self._number = int((options or {}).get("number", random.Random(seed).randint(1, self._largest)))
        self._steps = 0
        return f"I think of a number from 1 to {self._largest}. What is it?", {}

    def step(self, action: str) -> StepResult:
        """Takes the last number in the text as the guess."""
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


class GridWalk:
    """The policy walks from a random cell of a `size` x `size` grid to another one.  Reaching it gives reward 1; after
    `max_steps` moves the game is truncated."""

    def __init__(self, *, size: int = 4, max_steps: int = 16, images: bool = False) -> None:
        self._size, self._max_steps, self._images = size, max_steps, images
        self._at: tuple[int, int] | None = None
        self._goal = (0, 0)
        self._steps = 0

    def reset(self, *, seed: int | None, options: Mapping[str, Any] | None) -> tuple[Observation, dict[str, Any]]:
        start, goal = random.Random(seed).sample(range(self._size**2), 2)
        self._at, self._goal = divmod(start, self._size), divmod(goal, self._size)
        self._steps = 0
        return self._observation(f"Say {', '.join(MOVES)} to walk to the goal. "), {}

    def step(self, action: str) -> StepResult:
        """Takes the last direction in the text as the move; a move beyond the border does nothing."""
        if self._at is None:
            raise EnvError("step before reset")
        self._steps += 1
        found = _MOVE.findall(str(action)[-1000:].lower())
        if found:
            across, down = MOVES[found[-1]]
            self._at = self._inside(self._at[0] + across), self._inside(self._at[1] + down)
        reached = self._at == self._goal
        over = self._steps >= self._max_steps and not reached
        return self._observation("" if found else "That is no direction. "), float(reached), reached, over, {}

    def _inside(self, place: int) -> int:
        return min(self._size - 1, max(0, place))

    def _observation(self, before: str) -> Observation:
        assert self._at is not None
        places = [f"column {column}, row {row}" for column, row in (self._at, self._goal)]
        text = f"{before}You are at {places[0]}; the goal is at {places[1]}."
        return ImageObservation(pixels=self._image(self._at), text=text) if self._images else text

    def _image(self, at: tuple[int, int]) -> np.ndarray:
        """Returns the image (size x PIXELS, size x PIXELS, 3) uint8: the goal is green, the walker red."""
        cells = np.zeros((self._size, self._size, 3), dtype=np.uint8)
        cells[self._goal[1], self._goal[0], 1] = 255
        cells[at[1], at[0], 0] = 255
        return cells.repeat(PIXELS, axis=0).repeat(PIXELS, axis=1)

    def get_state(self) -> dict[str, Any]:
        return {"at": self._at, "goal": self._goal, "steps": self._steps}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._at, self._goal, self._steps = tuple(state["at"]), tuple(state["goal"]), int(state["steps"])

    def close(self) -> None:
        self._at = None
