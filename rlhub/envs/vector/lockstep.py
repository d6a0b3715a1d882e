"""LockStep: a VectorEnv of simulators in this process, one after the other.

It has what is alike for all simulators: an episode that ends within a chunk executes no more of its actions, the next one begins
at the end of the chunk, and an observation is rendered only where somebody reads it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from rlhub.envs.base import EnvError
from rlhub.envs.registry import environment_factory
from rlhub.envs.vector.base import ChunkResult, Obs, Observed, Simulator, VectorEnv, VectorSpec, next_seed

HEAD = struct.Struct("<q")  # before a state: the length of its JSON part


@dataclass(slots=True, kw_only=True)
class Buffers:
    """The arrays of one chunk of N environments, in ordinary or shared memory; see ChunkResult.  final_images and final_state
    have N rows, of which those of ended episodes are written; frame_images and frame_state are None unless all steps are
    observed."""

    actions: np.ndarray
    images: np.ndarray
    state: np.ndarray
    final_images: np.ndarray
    final_state: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    valid: np.ndarray
    success: np.ndarray
    seed: np.ndarray
    final_seed: np.ndarray
    frame_images: np.ndarray | None = None
    frame_state: np.ndarray | None = None

    @staticmethod
    def shapes(spec: VectorSpec, num_envs: int, frames: bool) -> dict[str, tuple[tuple[int, ...], type]]:
        """Returns the shape and dtype of each array."""
        n, c, d = num_envs, spec.chunk, spec.state_dim
        pictures, steps = (spec.picture_shape, np.uint8), ((n, c), np.bool_)
        found: dict[str, tuple[tuple[int, ...], type]] = {
            "actions": ((n, c, spec.action_dim), np.float32),
            "images": ((n, *pictures[0]), np.uint8),
            "state": ((n, d), np.float32),
            "final_images": ((n, *pictures[0]), np.uint8),
            "final_state": ((n, d), np.float32),
            "reward": ((n, c), np.float32),
            "terminated": steps,
            "truncated": steps,
            "valid": steps,
            "success": ((n,), np.bool_),
            "seed": ((n,), np.int64),
            "final_seed": ((n,), np.int64),
        }
        if frames:
            found |= {"frame_images": ((n, c, *pictures[0]), np.uint8), "frame_state": ((n, c, d), np.float32)}
        return found

    @classmethod
    def new(cls, spec: VectorSpec, num_envs: int, *, frames: bool) -> Buffers:
        """Returns buffers in ordinary memory."""
        return cls(**{name: np.zeros(shape, dtype) for name, (shape, dtype) in cls.shapes(spec, num_envs, frames).items()})


@dataclass(slots=True, kw_only=True)
class Texts:
    """The results of a chunk beside the arrays, in a form that JSON has: the instructions of the running and of the ended
    episodes, the info of each environment, and the number of observations that were rendered."""

    instruction: list[str]
    final_instruction: list[str]
    info: list[dict[str, Any]]
    num_rendered: int


@dataclass(slots=True)
class _Running:
    """The episode of one environment.  actions: those executed, kept only where the state is replayed."""

    seed: int = -1
    initial: int | None = None
    instruction: str = ""
    steps: int = 0
    ended: bool = True
    actions: list[list[float]] = field(default_factory=list)


class LockStep(VectorEnv):
    """N simulators of one kind.  auto_reset: an environment whose episode has ended begins the next one; otherwise it executes
    nothing (valid is False) until it is reset."""

    def __init__(self, make: Callable[[], Simulator], num_envs: int, *, chunk: int = 0, auto_reset: bool = True) -> None:
        """Builds the simulators.  chunk: the largest number of actions of one call; 0: the spec's."""
        self.simulators = [make() for _ in range(num_envs)]
        given = getattr(self.simulators[0], "spec", None)
        if not isinstance(given, VectorSpec):
            raise EnvError(f"{type(self.simulators[0]).__name__} has no VectorSpec as `spec`: it does not act in lock-step")
        spec = given
        self.spec, self.num_envs = replace(spec, chunk=chunk or spec.chunk), num_envs
        self._auto_reset, self._closed = auto_reset, False
        self._episodes = [_Running() for _ in range(num_envs)]
        self._last = Buffers.new(replace(self.spec, chunk=1), num_envs, frames=False) if not auto_reset else None

    def reset(self, ids: Sequence[int] | None = None, *, seeds: Sequence[int], initial: Sequence[int] | None = None) -> Obs:
        buffers = Buffers.new(self.spec, self.num_envs, frames=False)
        return rows_of(buffers, chosen := self.checked_ids(ids), self.reset_into(buffers, chosen, seeds, initial))

    def reset_into(self, buffers: Buffers, ids: Sequence[int], seeds: Sequence[int], initial: Sequence[int] | None) -> list[str]:
        """Does the same as `reset`, into the rows `ids` of the buffers; returns the instructions."""
        self._need_open()
        self.checked_ids(ids, seeds=seeds, initial=initial)
        for place, number in enumerate(ids):
            self._begin(number, int(seeds[place]), None if initial is None else int(initial[place]))
            self._observe(number, buffers)
        return [self._episodes[number].instruction for number in ids]

    def chunk_step(self, actions: np.ndarray, obs: Observed = "last") -> ChunkResult:
        buffers = Buffers.new(self.spec, self.num_envs, frames=obs == "all")
        checked = self.checked_actions(actions)
        return result_of(buffers, checked.shape[1], self.chunk_into(buffers, checked, obs))

    def chunk_into(self, buffers: Buffers, actions: np.ndarray, obs: Observed) -> Texts:
        """Does the same as `chunk_step`, into the first C columns of the buffers.  actions: checked ones."""
        self._need_open()
        if self._auto_reset and (never := [number for number, episode in enumerate(self._episodes) if episode.seed < 0]):
            raise EnvError(f"chunk_step before reset of the environments {never}")
        texts = Texts(instruction=[], final_instruction=[], info=[], num_rendered=0)
        for name in ("reward", "terminated", "truncated", "valid", "success"):
            getattr(buffers, name)[:] = 0
        for number in range(self.num_envs):
            self._chunk_of(number, actions[number], buffers, texts, frames=obs == "all")
        return texts

    def get_state(self, ids: Sequence[int] | None = None) -> list[bytes]:
        self._need_open()
        if self.spec.state == "none":
            raise EnvError(f"{type(self.simulators[0]).__name__} cannot save its state; end its episodes and reset it instead")
        return [self._state_of(number) for number in self.checked_ids(ids)]

    def load_state(self, ids: Sequence[int] | None, states: Sequence[bytes]) -> Obs:
        buffers = Buffers.new(self.spec, self.num_envs, frames=False)
        return rows_of(buffers, chosen := self.checked_ids(ids, states=states), self.load_into(buffers, chosen, states))

    def load_into(self, buffers: Buffers, ids: Sequence[int], states: Sequence[bytes]) -> list[str]:
        """Does the same as `load_state`, into the rows `ids` of the buffers; returns the instructions."""
        self._need_open()
        for number, state in zip(ids, states, strict=True):
            self._load(number, state)
            self._observe(number, buffers)
        return [self._episodes[number].instruction for number in ids]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for simulator in self.simulators:
                simulator.close()

    def _need_open(self) -> None:
        if self._closed:
            raise EnvError("the environments are closed; make new ones")

    def _begin(self, number: int, seed: int, initial: int | None) -> None:
        count = self.spec.initial_states
        if seed < 0 or (initial is not None and not 0 <= initial < count):
            raise ValueError(f"seed {seed} must be at least 0, and initial state {initial} one of the {count} that there are")
        episode = _Running(seed=seed, initial=initial, ended=False)
        episode.instruction = self.simulators[number].reset(seed, initial)
        self._episodes[number] = episode

    def _observe(self, number: int, buffers: Buffers) -> None:
        self.simulators[number].observe(buffers.images[number], buffers.state[number])
        buffers.seed[number] = self._episodes[number].seed
        if self._last is not None:
            self._last.images[number], self._last.state[number] = buffers.images[number], buffers.state[number]

    def _chunk_of(self, number: int, actions: np.ndarray, buffers: Buffers, texts: Texts, *, frames: bool) -> None:
        episode, info = self._episodes[number], {}
        was_running = not episode.ended
        for place, action in enumerate(actions):
            if not episode.ended:
                info = self._step(number, place, action, buffers)
                if frames:
                    assert buffers.frame_images is not None and buffers.frame_state is not None
                    self.simulators[number].observe(buffers.frame_images[number, place], buffers.frame_state[number, place])
                    texts.num_rendered += 1
            elif frames:
                assert buffers.frame_images is not None and buffers.frame_state is not None
                buffers.frame_images[number, place], buffers.frame_state[number, place] = 0, 0
        texts.info.append(info)
        if was_running:
            texts.num_rendered += self._finish(number, buffers, texts)
        else:
            assert self._last is not None  # an environment that waits for its reset shows its last observation
            buffers.images[number], buffers.state[number] = self._last.images[number], self._last.state[number]
        texts.instruction.append(self._episodes[number].instruction)

    def _step(self, number: int, place: int, action: np.ndarray, buffers: Buffers) -> dict[str, Any]:
        """Executes one action and writes its numbers."""
        episode, outcome = self._episodes[number], self.simulators[number].step(action)
        episode.steps += 1
        if self.spec.state == "replay":
            episode.actions.append(action.tolist())
        late = episode.steps >= self.spec.max_steps and not outcome.terminated
        episode.ended = outcome.terminated or outcome.truncated or late
        buffers.reward[number, place], buffers.valid[number, place] = outcome.reward, True
        buffers.terminated[number, place] = outcome.terminated
        buffers.truncated[number, place] = (outcome.truncated or late) and not outcome.terminated
        buffers.success[number] |= outcome.success
        return outcome.info

    def _finish(self, number: int, buffers: Buffers, texts: Texts) -> int:
        """Renders the observation after the chunk; for an ended episode the final one, and the first of the next.  Returns the
        number of observations."""
        episode = self._episodes[number]
        self._observe(number, buffers)
        if not episode.ended:
            return 1
        buffers.final_images[number], buffers.final_state[number] = buffers.images[number], buffers.state[number]
        buffers.final_seed[number] = episode.seed
        texts.final_instruction.append(episode.instruction)
        if not self._auto_reset:
            return 1
        self._begin(number, next_seed(episode.seed), None)
        self._observe(number, buffers)
        return 2

    def _state_of(self, number: int) -> bytes:
        episode = self._episodes[number]
        if episode.seed < 0:
            raise EnvError(f"get_state before reset of the environment {number}")
        head = json.dumps(asdict(episode)).encode()
        return HEAD.pack(len(head)) + head + (self.simulators[number].get_state() if self.spec.state == "exact" else b"")

    def _load(self, number: int, state: bytes) -> None:
        (length,) = HEAD.unpack_from(state)
        episode = _Running(**json.loads(state[HEAD.size : HEAD.size + length]))
        simulator = self.simulators[number]
        if self.spec.state == "exact":
            simulator.load_state(state[HEAD.size + length :])
        else:
            simulator.reset(episode.seed, episode.initial)
            for action in episode.actions:
                simulator.step(np.asarray(action, np.float32))
        self._episodes[number] = episode


def make_vector_env(
    name: str, settings: Mapping[str, Any], num_envs: int, *, chunk: int = 0, auto_reset: bool = True
) -> VectorEnv:
    """Builds `num_envs` environments of a registered name, `module:name` or `path/to/file.py:name` in this process.

    The factory builds one Simulator of the settings; a subclass of VectorEnv is called with num_envs, chunk and auto_reset too.
    """
    factory: Any = environment_factory(name)
    is_vector = isinstance(factory, type) and issubclass(factory, VectorEnv)
    if is_vector:
        built: VectorEnv = factory(num_envs=num_envs, chunk=chunk, auto_reset=auto_reset, **settings)
        return built
    return LockStep(lambda: factory(**settings), num_envs, chunk=chunk, auto_reset=auto_reset)


def rows_of(buffers: Buffers, ids: Sequence[int], instruction: list[str]) -> Obs:
    """Returns the observations in these rows of the buffers, as arrays of their own."""
    rows = list(ids)
    return Obs(images=buffers.images[rows], state=buffers.state[rows], instruction=instruction, seed=buffers.seed[rows])


def result_of(buffers: Buffers, chunk: int, texts: Texts) -> ChunkResult:
    """Returns the result of a chunk of this length.  It shares the memory of the buffers, except that of final_obs."""
    steps = {name: getattr(buffers, name)[:, :chunk] for name in ("reward", "terminated", "truncated", "valid")}
    ended = np.flatnonzero((steps["terminated"] | steps["truncated"]).any(axis=1))
    frames = None
    if buffers.frame_images is not None and buffers.frame_state is not None:
        images, state = buffers.frame_images[:, :chunk], buffers.frame_state[:, :chunk]
        frames = Obs(images=images, state=state, instruction=texts.instruction, seed=buffers.seed)
    return ChunkResult(
        obs=Obs(images=buffers.images, state=buffers.state, instruction=texts.instruction, seed=buffers.seed),
        final_obs=Obs(
            images=buffers.final_images[ended],
            state=buffers.final_state[ended],
            instruction=texts.final_instruction,
            seed=buffers.final_seed[ended],
        ),
        **steps,
        success=buffers.success,
        lost=np.zeros(len(buffers.success), np.bool_),
        info=texts.info,
        num_rendered=texts.num_rendered,
        frames=frames,
    )
