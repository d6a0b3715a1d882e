"""check_vector_env: the conformance suite that every environment in lock-step passes.

    python -m rlhub.envs.vector.check reach_color --settings '{"size": 32}' --processes 2

Each check is a function of a Subject; it raises EnvError that says what differs.  An environment whose check fails would train a
policy on wrong data without an error, which is why recorded faults of real simulators stand here: a picture that is never
written, a state that lacks velocities, actions that are executed after the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhub.envs.base import EnvError
from rlhub.envs.vector.base import ChunkResult, Obs, VectorEnv, next_seed
from rlhub.envs.vector.lockstep import make_vector_env
from rlhub.envs.vector.manager import EnvManager, EnvManagerOptions

SEED = 1000
NUMBERS = ("reward", "terminated", "truncated", "valid", "success", "lost")


@dataclass(slots=True, kw_only=True)
class Subject:
    """The environments under test.  chunks: the length of the trajectories that are compared, in chunks."""

    env: VectorEnv
    chunks: int = 100

    def seeds(self, first: int = SEED) -> list[int]:
        return list(range(first, first + self.env.num_envs))

    def actions(self, seed: int, chunk: int = 0) -> np.ndarray:
        """Returns random actions within the bounds, (N, C, A) float32."""
        spec = self.env.spec
        low, high = np.maximum(spec.low, -1e3), np.minimum(spec.high, 1e3)  # a bound may be infinite
        shape = (self.env.num_envs, chunk or spec.chunk, spec.action_dim)
        drawn: np.ndarray = np.random.default_rng(seed).uniform(low, high, shape)
        return drawn.astype(np.float32)

    def play(self, chunks: int, first: int = 0) -> list[ChunkResult]:
        """Executes chunks of random actions, which `first` decides."""
        return [self.env.chunk_step(self.actions(first + number)) for number in range(chunks)]


def check_vector_env(env: VectorEnv, *, chunks: int = 100) -> list[str]:
    """Runs all checks and returns their names.  Raises EnvError with the name of the first that fails.

    The environment may be in any state before and is reset after.  It has at least 2 environments and automatic resets.  chunks:
    length of the trajectories from a saved state.
    """
    if env.num_envs < 2:
        raise EnvError("check_vector_env needs at least 2 environments, to see that one does not change another")
    subject = Subject(env=env, chunks=chunks)
    for check in CHECKS:
        try:
            check(subject)
        except EnvError as error:
            raise EnvError(f"{check.__name__}: {error}") from error
    return [check.__name__ for check in CHECKS]


def shapes_and_types(subject: Subject) -> None:
    """Checks shapes and dtypes of all arrays, and that they belong to the caller."""
    env, spec = subject.env, subject.env.spec
    first = env.reset(seeds=subject.seeds())
    _check_obs(first, env.num_envs, spec)
    kept = (first.images.copy(), first.state.copy())
    result = env.chunk_step(subject.actions(0))
    for name in NUMBERS:
        array = getattr(result, name)
        shape = (env.num_envs,) if name in ("success", "lost") else (env.num_envs, spec.chunk)
        dtype = np.dtype(np.float32 if name == "reward" else np.bool_)
        _need(array.shape == shape and array.dtype == dtype, f"{name} is {array.shape} {array.dtype}, not {shape} {dtype}")
    _check_obs(result.obs, env.num_envs, spec)
    _check_obs(result.final_obs, int(result.ended.sum()), spec)
    _need(len(result.info) == env.num_envs, f"info has {len(result.info)} entries for {env.num_envs} environments")
    same = all(np.array_equal(old, new) for old, new in zip(kept, (first.images, first.state), strict=True))
    _need(same, "a chunk has changed the arrays of an earlier observation; return new ones")
    part = env.reset([1], seeds=[SEED + 1])
    _need(len(part) == 1 and _difference(_row(first, 1), part) is None, "a reset of one environment returns another row")


def pictures_show_something(subject: Subject) -> None:
    """Checks that no picture is constant, and that pictures differ between scenes or change with actions."""
    spec = subject.env.spec
    first = subject.env.reset(seeds=subject.seeds())
    _check_pictures(first, spec.cameras)
    if spec.cameras:
        later = [result.obs.images for result in subject.play(4)]
        varied = any(not np.array_equal(first.images, images) for images in later)
        _need(varied, "the pictures do not change while random actions are executed; does each render write its target?")


def equal_seeds_give_equal_episodes(subject: Subject) -> None:
    """Checks that seeds and actions alone decide an episode: not its place, nor what was before it."""
    env, count = subject.env, min(8, subject.chunks)
    start, first = env.reset(seeds=subject.seeds()), subject.play(count)
    again, second = env.reset(seeds=subject.seeds()), subject.play(count)
    _need(_difference(start, again) is None, f"{_difference(start, again)} of the first observation differ with equal seeds")
    _compare(first, second, "the second time, with equal seeds and actions")
    other = env.reset(seeds=subject.seeds(SEED + 500))
    same = _difference(start, other) is None
    _need(not same or env.spec.initial_states == 1, "other seeds begin the same episodes")
    moved = env.reset([1], seeds=[SEED])
    _need(_difference(_row(start, 0), moved) is None, "an equal seed begins another episode in another environment")


def environments_are_independent(subject: Subject) -> None:
    """Checks that the reset of one environment does not change the others."""
    env = subject.env
    env.reset(seeds=subject.seeds())
    subject.play(1)
    alone = subject.play(1, first=1)[0]
    env.reset(seeds=subject.seeds())
    subject.play(1)
    env.reset([0], seeds=[SEED + 77])
    beside = subject.play(1, first=1)[0]
    others = list(range(1, env.num_envs))
    for name in ("reward", "valid", "terminated", "truncated"):
        same = np.array_equal(getattr(alone, name)[others], getattr(beside, name)[others])
        _need(same, f"{name} of the other environments changes when environment 0 is reset")
    _need(np.array_equal(alone.obs.images[others], beside.obs.images[others]), "pictures of the others change too")


def chunks_stop_at_the_end(subject: Subject) -> None:
    """Checks that an ended episode executes no more actions, that max_steps holds, and how the next episode begins."""
    env, spec = subject.env, subject.env.spec
    seeds = np.array(env.reset(seeds=subject.seeds()).seed)
    steps, num_ended = np.zeros(env.num_envs, int), 0
    for number in range(-(-spec.max_steps // spec.chunk) + 1):
        result = env.chunk_step(subject.actions(number))
        over = result.terminated | result.truncated
        _need(not (result.terminated & result.truncated).any(), "an action is both terminated and truncated")
        expected = np.cumsum(over, axis=1) - over == 0
        _need(np.array_equal(result.valid, expected), "valid must be True up to the end of the episode, and False after it")
        _need(not result.reward[~result.valid].any(), "actions that are not valid have a reward")
        steps += result.valid.sum(axis=1)
        _need(bool((steps <= spec.max_steps).all()), f"an episode is longer than max_steps={spec.max_steps}")
        for row in map(int, np.flatnonzero(result.ended)):
            wanted = next_seed(int(seeds[row]))
            _need(int(result.obs.seed[row]) == wanted, "the next episode has not the seed next_seed(seed)")
            steps[row] = 0
        _need(np.array_equal(result.final_obs.seed, seeds[result.ended]), "final_obs has other rows than `ended`")
        num_ended += int(result.ended.sum())
        seeds = np.array(result.obs.seed)
    _need(num_ended >= env.num_envs, f"no environment ends an episode within max_steps={spec.max_steps} actions")
    again = env.reset(seeds=seeds.tolist())
    last = [row for row in range(env.num_envs) if result.ended[row]]
    for row in last:
        message = "the observation after an end is not the first one of the next episode"
        _need(_difference(_row(again, row), _row(result.obs, row)) is None, message)


def renders_only_what_is_read(subject: Subject) -> None:
    """Checks that "last" renders one observation per environment and ended episode, and "all" one per action too."""
    env, chunk = subject.env, subject.env.spec.chunk
    env.reset(seeds=subject.seeds())
    result = env.chunk_step(subject.actions(0), obs="last")
    most = env.num_envs + int(result.ended.sum())
    _need(
        result.num_rendered <= most,
        f"{result.num_rendered} observations rendered for a chunk of {chunk}, at most {most} are read",
    )
    _need(result.frames is None, 'obs="last" returns frames')
    env.reset(seeds=subject.seeds())
    every = env.chunk_step(subject.actions(0), obs="all")
    _need(_difference(result.obs, every.obs) is None, 'obs="all" ends with another observation than obs="last"')
    assert every.frames is not None
    running = ~every.ended
    _need(np.array_equal(every.frames.images[running, -1], every.obs.images[running]), "the last frame is not the observation")
    _need(not every.frames.images[~every.valid].any(), "frames of actions that are not valid are not zero")


def states_continue_exactly(subject: Subject) -> None:
    """Checks that a saved state, loaded after other episodes, continues bit for bit, random numbers included."""
    env = subject.env
    env.reset(seeds=subject.seeds())
    if env.spec.state == "none":
        try:
            env.get_state()
        except EnvError:
            return
        raise EnvError('spec.state is "none", but get_state returns something')
    subject.play(2)
    states = env.get_state()
    expected = subject.play(subject.chunks, first=10)
    env.reset(seeds=subject.seeds(SEED + 300))
    subject.play(3, first=5)
    loaded = env.load_state(None, states)
    _check_pictures(loaded, env.spec.cameras)
    _compare(expected, subject.play(subject.chunks, first=10), "after get_state and load_state")
    swapped = [states[1], states[0], *states[2:]]
    moved = env.load_state(None, swapped)
    _need(_difference(_row(loaded, 0), _row(moved, 1)) is None, "a state loaded in another environment gives another observation")


def offloads_and_continues(subject: Subject) -> None:
    """Checks, for a manager, that offload and onload in the middle of episodes change nothing."""
    env = subject.env
    if not isinstance(env, EnvManager) or env.spec.state == "none":
        return
    env.reset(seeds=subject.seeds())
    subject.play(2)
    expected = subject.play(8, first=20)
    env.reset(seeds=subject.seeds())
    subject.play(2)
    env.offload()
    _need(env.num_alive == 0, f"{env.num_alive} processes run after offload")
    _compare(expected, subject.play(8, first=20), "after offload and onload")
    _check_pictures(expected[-1].obs, env.spec.cameras)


def initial_states_are_fixed(subject: Subject) -> None:
    """Checks that the number of an initial state decides it, and that a number that does not exist is refused."""
    env, count = subject.env, subject.env.spec.initial_states
    numbers = [number % count for number in range(env.num_envs)] if count else []
    if count:
        first = env.reset(seeds=subject.seeds(), initial=numbers)
        again = env.reset(seeds=subject.seeds(), initial=numbers)
        _need(_difference(first, again) is None, "equal initial states differ")
    _refused(lambda: env.reset(seeds=subject.seeds(), initial=[count] * env.num_envs), f"initial state {count} of {count}")


def wrong_arguments_are_refused(subject: Subject) -> None:
    """Checks that wrong shapes, numbers and ids are errors, after which the environment continues."""
    env, spec = subject.env, subject.env.spec
    env.reset(seeds=subject.seeds())
    good = subject.actions(0)
    _refused(lambda: env.chunk_step(good[:, :, :-1]), "actions with a number too few")
    _refused(lambda: env.chunk_step(np.repeat(good, 2, axis=1)), f"a chunk of {2 * spec.chunk} actions")
    _refused(lambda: env.chunk_step(np.full_like(good, np.nan)), "actions that are not numbers")
    _refused(lambda: env.reset([env.num_envs], seeds=[1]), "an environment that does not exist")
    _refused(lambda: env.reset(seeds=[1]), "one seed for several environments")
    far = env.chunk_step(np.full_like(good, 1e6))
    _need(bool(np.isfinite(far.reward).all()), "an action beyond the bounds gives a reward that is not finite")
    env.reset(seeds=subject.seeds())


CHECKS: Sequence[Callable[[Subject], None]] = (
    shapes_and_types,
    pictures_show_something,
    equal_seeds_give_equal_episodes,
    environments_are_independent,
    chunks_stop_at_the_end,
    renders_only_what_is_read,
    states_continue_exactly,
    offloads_and_continues,
    initial_states_are_fixed,
    wrong_arguments_are_refused,
)


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise EnvError(message)


def _refused(call: Callable[[], Any], what: str) -> None:
    try:
        call()
    except (ValueError, EnvError):
        return
    raise EnvError(f"{what}: taken without an error")


def _check_obs(obs: Obs, rows: int, spec: Any) -> None:
    wanted = {
        "images": ((rows, *spec.picture_shape), np.uint8),
        "state": ((rows, spec.state_dim), np.float32),
        "seed": ((rows,), np.int64),
    }
    for name, (shape, dtype) in wanted.items():
        array = getattr(obs, name)
        message = f"{name} is {array.shape} {array.dtype}, not {shape} {np.dtype(dtype)}"
        _need(array.shape == shape and array.dtype == dtype, message)
    _need(len(obs.instruction) == rows, f"{len(obs.instruction)} instructions for {rows} rows")
    _need(bool(np.isfinite(obs.state).all()), "state has numbers that are not finite")
    _need(not spec.language or all(obs.instruction), "an instruction is empty although the environment has language")


def _check_pictures(obs: Obs, cameras: Sequence[str]) -> None:
    for number, camera in enumerate(cameras):
        flat = obs.images[:, number].reshape(len(obs), -1)
        constant = np.flatnonzero(flat.max(axis=1) == flat.min(axis=1))
        _need(not len(constant), f"the picture of camera {camera!r} is constant in the environments {constant.tolist()}")


def _row(obs: Obs, row: int) -> Obs:
    return Obs(
        images=obs.images[row : row + 1],
        state=obs.state[row : row + 1],
        instruction=obs.instruction[row : row + 1],
        seed=obs.seed[row : row + 1],
    )


def _difference(one: Obs, other: Obs) -> str | None:
    """Returns what differs first between two observations, None if nothing does.  Seeds do not count."""
    if not np.array_equal(one.images, other.images):
        return f"pictures (by up to {int(np.abs(one.images.astype(int) - other.images).max())})"
    if one.state.tobytes() != other.state.tobytes():
        return f"state (by up to {float(np.abs(one.state - other.state).max()):.3g})"
    return None if one.instruction == other.instruction else "instructions"


def _compare(expected: Sequence[ChunkResult], found: Sequence[ChunkResult], when: str) -> None:
    """Raises EnvError at the first difference between two trajectories."""
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        for name in NUMBERS:
            same = getattr(one, name).tobytes() == getattr(other, name).tobytes()
            _need(same, f"{name} differs in chunk {number} {when}")
        _need(np.array_equal(one.obs.seed, other.obs.seed), f"seeds differ in chunk {number} {when}")
        differs = _difference(one.obs, other.obs)
        _need(differs is None, f"{differs} differ in chunk {number} {when}")


def main() -> None:
    parser = argparse.ArgumentParser(description=check_vector_env.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="registered, module:name or path/to/file.py:name")
    parser.add_argument("--settings", type=json.loads, default={}, help="keyword arguments of the environment, as JSON")
    parser.add_argument("--num-envs", type=int, default=4)
    parser.add_argument("--processes", type=int, default=2, help="0: in this process")
    parser.add_argument("--python", default="", help="interpreter of the Python environment with the simulator's packages")
    parser.add_argument("--chunk", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=100, help="length of the trajectories from a saved state")
    given = parser.parse_args()
    options = {"name": given.name, "settings": given.settings, "num_envs": given.num_envs, "chunk": given.chunk}
    env = (
        EnvManager(EnvManagerOptions(processes=given.processes, python=given.python, **options))
        if given.processes
        else make_vector_env(**options)
    )
    try:
        sys.stdout.write("".join(f"passed  {name}\n" for name in check_vector_env(env, chunks=given.chunks)))
    finally:
        env.close()


if __name__ == "__main__":
    main()
