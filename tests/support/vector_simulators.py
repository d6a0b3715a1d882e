"""Small simulators for tests and measurements of environments in lock-step: right ones, and ones with a fault."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlhub.envs.vector.base import ChunkResult, Obs, StepOutcome, VectorEnv, VectorSpec
from rlhub.envs.vector.lockstep import LockStep


class Drift:
    """A point with velocity and noise, which must leave the unit disc; its pictures shift with it.

    sleep_s: waits in each step.  trap: what a step does whose first number is above 0.99: "hang", "grow" (takes memory without
    end) or "raise".  observed: the number of observations, over all instances of the process.
    """

    observed = 0

    def __init__(
        self, *, size: int = 8, cameras: int = 2, chunk: int = 8, max_steps: int = 20, sleep_s: float = 0.0, trap: str = ""
    ) -> None:
        self.spec = VectorSpec(
            cameras=tuple(f"camera{number}" for number in range(cameras)),
            height=size,
            width=size,
            state_dim=4,
            action_dim=2,
            low=(-1.0, -1.0),
            high=(1.0, 1.0),
            chunk=chunk,
            max_steps=max_steps,
            language=True,
            state="exact",
            initial_states=6,
        )
        self._sleep_s, self._trap = sleep_s, trap
        self._at, self._speed, self._rng = np.zeros(2), np.zeros(2), np.random.default_rng(0)
        self._ramp = np.arange(size * size * 3, dtype=np.uint8).reshape(size, size, 3)

    def reset(self, seed: int, initial: int | None) -> str:
        self._rng = np.random.default_rng(seed)
        self._at = self._rng.uniform(-0.3, 0.3, 2) if initial is None else np.full(2, initial / 10)
        self._speed = np.zeros(2)
        return f"leave from {self._at.round(2).tolist()}"

    def step(self, action: np.ndarray) -> StepOutcome:
        time.sleep(self._sleep_s)
        if self._trap and action[0] > 0.99:
            self._spring()
        self._speed = 0.9 * self._speed + 0.1 * action + self._rng.normal(0, 0.02, 2)
        self._at = self._at + self._speed
        away = float(np.linalg.norm(self._at))
        return StepOutcome(reward=away, terminated=away > 1, success=away > 1, info={"away": away})

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        Drift.observed += 1
        images[:] = self._ramp + np.uint8(int(abs(self._at[0]) * 1000) % 200)
        state[:2], state[2:] = self._at, self._speed

    def get_state(self) -> bytes:
        return json.dumps([self._at.tolist(), self._speed.tolist(), self._rng.bit_generator.state]).encode()

    def load_state(self, state: bytes) -> None:
        at, speed, self._rng.bit_generator.state = json.loads(state)
        self._at, self._speed = np.array(at), np.array(speed)

    def close(self) -> None:
        """Holds nothing."""

    def _spring(self) -> None:
        if self._trap == "raise":
            raise RuntimeError("the simulation has become unstable")
        kept = []
        while True:
            time.sleep(0.01)
            if self._trap == "grow":
                kept.append(np.empty(2**26))  # 512 MiB


class Meeting(Drift):
    """A right one whose steps wait until two processes have come to one; they meet in the folder `meet`."""

    def __init__(self, *, meet: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._meet = Path(meet)

    def step(self, action: np.ndarray) -> StepOutcome:
        (self._meet / str(os.getpid())).touch()
        while len(list(self._meet.iterdir())) < 2:
            time.sleep(0.01)
        return super().step(action)


class PositionsOnly(Drift):
    """A fault: the state has positions and random numbers, but no velocities."""

    def get_state(self) -> bytes:
        return json.dumps([self._at.tolist(), [0.0, 0.0], self._rng.bit_generator.state]).encode()


class WithoutRandomNumbers(Drift):
    """A fault: the state lacks the random numbers."""

    def load_state(self, state: bytes) -> None:
        at, speed, _ = json.loads(state)
        self._at, self._speed = np.array(at), np.array(speed)


class Blind(Drift):
    """A fault: the pictures are never written."""

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        kept = images.copy()
        super().observe(images, state)
        images[:] = kept


class Frozen(Drift):
    """A fault: each camera shows the picture of the first scene."""

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        super().observe(images, state)
        images[:] = self._ramp


class Leaky(Drift):
    """A fault: instances share their random numbers."""

    shared = np.random.default_rng(0)

    def reset(self, seed: int, initial: int | None) -> str:
        text = super().reset(seed, initial)
        self._rng = Leaky.shared
        return text


class Endless(Drift):
    """A fault: an instruction that is empty."""

    def reset(self, seed: int, initial: int | None) -> str:
        super().reset(seed, initial)
        return ""


class Replayed(Drift):
    """A right one whose state is its history."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.spec = VectorSpec.of({name: getattr(self.spec, name) for name in self.spec.__slots__} | {"state": "replay"})

    def get_state(self) -> bytes:
        raise AssertionError("a replayed environment is never asked for its state")


class Stateless(Replayed):
    """A right one that cannot save its state."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.spec = VectorSpec.of({name: getattr(self.spec, name) for name in self.spec.__slots__} | {"state": "none"})


class Batched(VectorEnv):
    """A right VectorEnv that is not made of simulators by a child: it passes every call on to a LockStep."""

    def __init__(self, *, num_envs: int, chunk: int, auto_reset: bool) -> None:
        self._inner = LockStep(Drift, num_envs, chunk=chunk, auto_reset=auto_reset)
        self.spec, self.num_envs = self._inner.spec, num_envs

    def reset(self, ids: Any = None, *, seeds: Any, initial: Any = None) -> Obs:
        return self._inner.reset(ids, seeds=seeds, initial=initial)

    def chunk_step(self, actions: np.ndarray, obs: Any = "last") -> ChunkResult:
        return self._inner.chunk_step(actions, obs)

    def get_state(self, ids: Any = None) -> list[bytes]:
        return self._inner.get_state(ids)

    def load_state(self, ids: Any, states: Any) -> Obs:
        return self._inner.load_state(ids, states)

    def close(self) -> None:
        self._inner.close()


class RunsOn(Batched):
    """A fault: actions after the end of an episode are counted as executed."""

    def chunk_step(self, actions: np.ndarray, obs: Any = "last") -> ChunkResult:
        result = super().chunk_step(actions, obs)
        result.valid[:] = True
        return result


class RendersAll(Batched):
    """A fault: every action is rendered, though only the last observation is read."""

    def chunk_step(self, actions: np.ndarray, obs: Any = "last") -> ChunkResult:
        result = super().chunk_step(actions, "all")
        result.frames = result.frames if obs == "all" else None
        return result


class Reuses(Batched):
    """A fault: all observations share their memory."""

    kept: dict[str, np.ndarray] = {}

    def reset(self, ids: Any = None, *, seeds: Any, initial: Any = None) -> Obs:
        return self._shared(super().reset(ids, seeds=seeds, initial=initial))

    def chunk_step(self, actions: np.ndarray, obs: Any = "last") -> ChunkResult:
        result = super().chunk_step(actions, obs)
        result.obs = self._shared(result.obs)
        return result

    def _shared(self, obs: Obs) -> Obs:
        if len(obs) == self.num_envs:
            images = Reuses.kept.setdefault("images", obs.images)
            images[:] = obs.images
            obs.images = images
        return obs


class Countdown:
    """Terminates after seed % 7 + 1 actions, or initial + 1 from a fixed initial state, and is truncated after four.

    The reward of an action is its number.  The picture's first pixel is the seed, the second one the number of executed actions.
    """

    def __init__(self, *, sleep_s: float = 0.0) -> None:
        self.spec = VectorSpec(
            cameras=("top",),
            height=2,
            width=1,
            action_dim=2,
            low=(-1.0, -1.0),
            high=(1.0, 1.0),
            chunk=2,
            max_steps=4,
            language=True,
            initial_states=7,
        )
        self._sleep_s, self._seed, self._left, self._done = sleep_s, 0, 0, 0

    def reset(self, seed: int, initial: int | None) -> str:
        self._seed, self._left, self._done = seed, (seed % 7 if initial is None else initial) + 1, 0
        return ("red", "blue")[seed % 2]

    def step(self, action: np.ndarray) -> StepOutcome:
        time.sleep(self._sleep_s)
        self._done += 1
        return StepOutcome(reward=self._done, terminated=self._done == self._left, success=self._done == self._left)

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        images[0, 0], images[0, 1] = self._seed % 256, self._done

    def get_state(self) -> bytes:
        raise AssertionError("its spec says that it has none")

    def load_state(self, state: bytes) -> None:
        raise AssertionError("its spec says that it has none")

    def close(self) -> None:
        """Holds nothing."""
