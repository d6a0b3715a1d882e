"""grid_walk: walk to a goal on a grid, by words or, with `images`, by what is seen."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhub.envs.base import EnvError, ImageObservation, Observation, StepResult

MOVES = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
_MOVE = re.compile("|".join(MOVES))
PIXELS = 8  # of a cell's side


class GridWalk:
    """Start and goal are different cells of a `size` x `size` grid.  Reward 1 at the goal; over after `max_steps` moves."""

    def __init__(self, *, size: int = 4, max_steps: int = 16, images: bool = False) -> None:
        self._size, self._max_steps, self._images = size, max_steps, images
        self._at: tuple[int, int] | None = None
        self._goal = (0, 0)
        self._steps = 0

    def reset(self, *, seed: int | None, options: Mapping[str, Any] | None) -> tuple[Observation, dict[str, Any]]:
        start, goal = random.Random(seed).sample(range(self._size**2), 2)
        self._at, self._goal = divmod(start, self._size), divmod(goal, self._size)
        self._steps = 0
        return self._seen(f"Say {', '.join(MOVES)} to walk to the goal. "), {}

    def step(self, action: str) -> StepResult:
        """The last direction in the text is the move; at the border one stays."""
        if self._at is None:
            raise EnvError("step before reset")
        self._steps += 1
        found = _MOVE.findall(str(action)[-1000:].lower())
        if found:
            across, down = MOVES[found[-1]]
            self._at = self._inside(self._at[0] + across), self._inside(self._at[1] + down)
        reached = self._at == self._goal
        over = self._steps >= self._max_steps and not reached
        return self._seen("" if found else "That is no direction. "), float(reached), reached, over, {}

    def _inside(self, place: int) -> int:
        return min(self._size - 1, max(0, place))

    def _seen(self, before: str) -> Observation:
        assert self._at is not None
        places = [f"column {column}, row {row}" for column, row in (self._at, self._goal)]
        text = f"{before}You are at {places[0]}; the goal is at {places[1]}."
        return ImageObservation(pixels=self._drawn(self._at), text=text) if self._images else text

    def _drawn(self, at: tuple[int, int]) -> np.ndarray:
        """(size x PIXELS, size x PIXELS, 3): the goal green, the walker red."""
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
