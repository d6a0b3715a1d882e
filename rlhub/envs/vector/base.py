"""The interfaces of lock-step environments.

A Simulator is one environment with plain methods, which is all that an adapter has to write; lockstep.py makes a VectorEnv of
several.  A simulator that is batched itself implements VectorEnv directly.  These modules load neither torch nor ray, because
child processes import them, also in a Python that has neither.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from rlhub.envs.base import EnvError

StateKind = Literal["exact", "replay", "none"]
Observed = Literal["last", "all"]
SEED_BITS = 63


@dataclass(slots=True, kw_only=True, frozen=True)
class VectorSpec:
    """The properties of an environment.

    cameras: names of its K pictures of height x width RGB pixels; () if it has none.  state_dim: D.  action_dim: A.  low, high:
    bounds of the A numbers; actions are clipped to them.  chunk: C, the largest number of actions of one call.  max_steps:
    actions after which an episode is truncated.  language: the instruction says what is to be done.

    state: what `get_state` gives.  exact: the simulator's whole state, random numbers included.  replay: seed and actions, which
    are executed again.  none: it cannot be saved.  initial_states: the number of fixed initial states, 0 if there are none.
    """

    cameras: tuple[str, ...] = ()
    height: int = 0
    width: int = 0
    state_dim: int = 0
    action_dim: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    chunk: int = 1
    max_steps: int
    language: bool = False
    state: StateKind = "none"
    initial_states: int = 0

    def __post_init__(self) -> None:
        low, high = np.asarray(self.low), np.asarray(self.high)
        if low.shape != (self.action_dim,) or high.shape != (self.action_dim,) or not (low < high).all():
            raise EnvError(f"low and high must be {self.action_dim} numbers with low < high, got {self.low} and {self.high}")
        if self.chunk < 1 or self.max_steps < 1 or (self.cameras and min(self.height, self.width) < 1):
            raise EnvError(f"chunk, max_steps and the size of pictures must be at least 1: {self}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> VectorSpec:
        """Returns the spec of these fields, in which lists may stand for tuples, as JSON has them."""
        fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**fields)

    @property
    def picture_shape(self) -> tuple[int, int, int, int]:
        """Returns the shape (K, H, W, 3) of one environment's pictures."""
        return (len(self.cameras), self.height, self.width, 3)


@dataclass(slots=True, kw_only=True)
class Obs:
    """Observations of N environments.

    images: (N, K, H, W, 3) uint8.  state: (N, D) float32.  instruction: N texts, "" without language.  seed: (N,) int64, the seed
    of the episode that the row shows.
    """

    images: np.ndarray
    state: np.ndarray
    instruction: list[str]
    seed: np.ndarray

    def __len__(self) -> int:
        return len(self.instruction)


@dataclass(slots=True, kw_only=True)
class ChunkResult:
    """The result of one chunk of C actions in each of N environments.

    obs: what the policy acts on next; for an ended episode the first observation of the next one.  final_obs: the last
    observation of the episodes that ended, as many rows as `ended` has, in the order of the environments.

    reward: (N, C) float32.  terminated, truncated: (N, C) bool, at the action that ended the episode by its own rules or by
    max_steps.  valid: (N, C) bool, False for actions that were not executed.  success: (N,) bool, the task was solved in this
    chunk.  lost: (N,) bool, the process of the environment ended, and with it the episode.

    info: plain values of the last executed action, for each environment.  num_rendered: observations that were rendered.
    frames: with obs="all" the observation after each action, images (N, C, K, H, W, 3) and state (N, C, D); zero where not valid.
    """

    obs: Obs
    final_obs: Obs
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    success: np.ndarray
    lost: np.ndarray
    info: list[dict[str, Any]]
    num_rendered: int
    frames: Obs | None = None

    @property
    def ended(self) -> np.ndarray:
        """Returns (N,) bool: the episode ended in this chunk."""
        ended: np.ndarray = (self.terminated | self.truncated).any(axis=1)
        return ended


@dataclass(slots=True, kw_only=True)
class StepOutcome:
    """The result of one action.  success: the task is solved.  info: values that have a JSON form."""

    reward: float
    terminated: bool
    truncated: bool = False
    success: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Simulator(Protocol):
    """One environment.  `spec` is known from construction on; calls come from one thread."""

    spec: VectorSpec

    def reset(self, seed: int, initial: int | None) -> str:
        """Begins an episode and returns its instruction.  Equal arguments begin equal episodes.  initial: the number of a fixed
        initial state; None: the seed decides."""
        ...

    def step(self, action: np.ndarray) -> StepOutcome:
        """Executes one action, (A,) float32 within the bounds."""
        ...

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        """Renders into images (K, H, W, 3) uint8 and writes state (D,) float32.  It does not change the simulation."""
        ...

    def get_state(self) -> bytes:
        """Returns the whole state, random numbers included.  Only called where spec.state is "exact"."""
        ...

    def load_state(self, state: bytes) -> None:
        """Continues from a state of `get_state`, also of another instance."""
        ...

    def close(self) -> None:
        """Releases all resources."""
        ...


class VectorEnv(ABC):
    """N environments that act in lock-step.  Calls block; all arrays that are returned belong to the caller."""

    spec: VectorSpec
    num_envs: int

    @abstractmethod
    def reset(self, ids: Sequence[int] | None = None, *, seeds: Sequence[int], initial: Sequence[int] | None = None) -> Obs:
        """Begins episodes in the environments `ids` (None: all) and returns their first observations, in the order of ids.

        seeds: one per id, 0 to 2^63 - 1; equal seeds begin equal episodes.  initial: numbers of fixed initial states, one per id.
        """

    @abstractmethod
    def chunk_step(self, actions: np.ndarray, obs: Observed = "last") -> ChunkResult:
        """Executes actions (N, C, A) float32, C at most spec.chunk; see ChunkResult.

        An episode that ends within the chunk executes no more actions; its environment begins the next one at the end of the
        chunk, with the seed `next_seed(seed)`.  obs: "last" renders one observation per environment, "all" one after each action.
        """

    @abstractmethod
    def get_state(self, ids: Sequence[int] | None = None) -> list[bytes]:
        """Returns the states of the environments `ids`.  Raises EnvError where spec.state is "none"."""

    @abstractmethod
    def load_state(self, ids: Sequence[int] | None, states: Sequence[bytes]) -> Obs:
        """Continues the episodes of these states in the environments `ids` and returns their observations."""

    @abstractmethod
    def close(self) -> None:
        """Releases all resources.  Idempotent."""

    def checked_ids(self, ids: Sequence[int] | None, **columns: Sequence[Any] | None) -> list[int]:
        """Returns the ids as a list, all of them for None.  Raises ValueError for a wrong id, or a column of another length."""
        found = list(range(self.num_envs)) if ids is None else [int(one) for one in ids]
        if len(set(found)) < len(found) or not all(0 <= one < self.num_envs for one in found):
            raise ValueError(f"ids must be different numbers from 0 to {self.num_envs - 1}, got {found}")
        for name, column in columns.items():
            if column is not None and len(column) != len(found):
                raise ValueError(f"{name} has {len(column)} entries for {len(found)} environments; give one for each")
        return found

    def checked_actions(self, actions: np.ndarray) -> np.ndarray:
        """Returns the actions as float32, clipped to the bounds.  Raises ValueError for a wrong shape or a number that is not
        finite."""
        spec, given = self.spec, np.asarray(actions, dtype=np.float32)
        if given.ndim != 3 or given.shape[::2] != (self.num_envs, spec.action_dim) or not 1 <= given.shape[1] <= spec.chunk:
            expected = f"({self.num_envs}, 1 to {spec.chunk}, {spec.action_dim})"
            raise ValueError(f"actions must have the shape {expected} (environments, chunk, numbers), got {given.shape}")
        if not np.isfinite(given).all():
            raise ValueError(f"actions of the environments {np.unique(np.argwhere(~np.isfinite(given))[:, 0])} are not finite")
        return given.clip(np.asarray(spec.low, np.float32), np.asarray(spec.high, np.float32))


def next_seed(seed: int) -> int:
    """Returns the seed of the episode that follows one of this seed in the same environment (splitmix64; Steele et al. 2014)."""
    mixed = (seed + 0x9E3779B97F4A7C15) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> shift)) * factor % 2**64
    return (mixed ^ (mixed >> 31)) >> (64 - SEED_BITS)


def render_without_display() -> None:
    """Lets MuJoCo render through EGL, which needs no display, unless the variables say otherwise.  Call it before its import."""
    os.environ.setdefault("MUJOCO_GL", "egl")
    os.environ.setdefault("PYOPENGL_PLATFORM", os.environ["MUJOCO_GL"])
