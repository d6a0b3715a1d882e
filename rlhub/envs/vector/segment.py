"""The memory that a manager shares with a child process, and the child's side of the calls.

Actions, pictures and numbers lie in one segment per child, which both map; a simulator renders right into it.  The pipe carries
the rest: which operation, texts, and states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rlhub.envs.base import EnvError
from rlhub.envs.vector.base import ChunkResult, Observed, VectorEnv, VectorSpec
from rlhub.envs.vector.lockstep import Buffers, LockStep, Texts, make_vector_env
from rlhub.utils.shared_segments import open_segment

ALIGN = 64  # bytes, a cache line


def segment_bytes(spec: VectorSpec, num_envs: int, *, frames: bool) -> int:
    """Returns the size of a segment in bytes."""
    return sum(_aligned(shape, dtype) for shape, dtype in Buffers.shapes(spec, num_envs, frames).values())


def buffers_in(memory: np.ndarray, spec: VectorSpec, num_envs: int, *, frames: bool) -> Buffers:
    """Returns buffers that lie in this memory, (size,) uint8, one array after the other."""
    arrays, start = {}, 0
    for name, (shape, dtype) in Buffers.shapes(spec, num_envs, frames).items():
        arrays[name] = np.ndarray(shape, dtype, memory.data, start)
        start += _aligned(shape, dtype)
    return Buffers(**arrays)


def _aligned(shape: tuple[int, ...], dtype: type) -> int:
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // ALIGN) * ALIGN


class ServedVector:
    """Serves environments in lock-step in a child process.  The manager's side is manager.py."""

    def __init__(self, target: str, settings: Mapping[str, Any], num_envs: int, options: Mapping[str, Any]) -> None:
        self._env: VectorEnv = make_vector_env(target, settings, num_envs, **options)
        self._buffers = Buffers.new(self._env.spec, 0, frames=False)

    @property
    def spec(self) -> dict[str, Any]:
        """Returns the fields of the spec."""
        return asdict(self._env.spec)

    def call(self, method: str, arguments: Mapping[str, Any]) -> Any:
        """Calls attach(path, frames), reset(ids, seeds, initial), chunk(chunk, obs), get_state(ids), load_state(ids, states) or
        close(); arrays are in the segment that was attached last."""
        match method:
            case "attach":
                return self._attach(**arguments)
            case "reset":
                return self._reset(**arguments)
            case "chunk":
                return self._chunk(**arguments)
            case "get_state":
                return self._env.get_state(arguments["ids"])
            case "load_state":
                return self._load_state(**arguments)
            case "close":
                return self._env.close()
        raise EnvError(f"environments in lock-step have no {method}")

    def _attach(self, path: str, frames: bool) -> None:
        memory = open_segment(Path(path))
        if memory is None:
            raise EnvError(f"the shared memory {path} cannot be opened by the environment's process")
        self._buffers = buffers_in(memory, self._env.spec, self._env.num_envs, frames=frames)

    def _reset(self, ids: list[int], seeds: list[int], initial: list[int] | None) -> list[str]:
        if isinstance(self._env, LockStep):
            return self._env.reset_into(self._buffers, ids, seeds, initial)
        return self._copied(ids, self._env.reset(ids, seeds=seeds, initial=initial))

    def _load_state(self, ids: list[int], states: list[bytes]) -> list[str]:
        if isinstance(self._env, LockStep):
            return self._env.load_into(self._buffers, ids, states)
        return self._copied(ids, self._env.load_state(ids, states))

    def _copied(self, ids: list[int], obs: Any) -> list[str]:
        buffers = self._buffers
        buffers.images[ids], buffers.state[ids], buffers.seed[ids] = obs.images, obs.state, obs.seed
        return list(obs.instruction)

    def _chunk(self, chunk: int, obs: Observed) -> dict[str, Any]:
        actions = self._buffers.actions[:, :chunk]
        if isinstance(self._env, LockStep):
            return asdict(self._env.chunk_into(self._buffers, actions, obs))
        return asdict(store(self._buffers, self._env.chunk_step(actions, obs)))


def store(buffers: Buffers, result: ChunkResult) -> Texts:
    """Copies a result into the buffers and returns its texts."""
    chunk, ended = result.reward.shape[1], np.flatnonzero(result.ended)
    for name in ("reward", "terminated", "truncated", "valid"):
        getattr(buffers, name)[:, :chunk] = getattr(result, name)
    buffers.success[:] = result.success
    buffers.images[:], buffers.state[:], buffers.seed[:] = result.obs.images, result.obs.state, result.obs.seed
    buffers.final_images[ended], buffers.final_state[ended] = result.final_obs.images, result.final_obs.state
    buffers.final_seed[ended] = result.final_obs.seed
    if result.frames is not None and buffers.frame_images is not None and buffers.frame_state is not None:
        buffers.frame_images[:, :chunk], buffers.frame_state[:, :chunk] = result.frames.images, result.frames.state
    return Texts(
        instruction=result.obs.instruction,
        final_instruction=result.final_obs.instruction,
        info=result.info,
        num_rendered=result.num_rendered,
    )
