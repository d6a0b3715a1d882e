"""Simulators in lock-step in one process: chunks, ends of episodes, states, and errors that say what to do."""

from __future__ import annotations

import numpy as np
import pytest

from rlhub.envs.base import EnvError
from rlhub.envs.vector.base import VectorSpec, next_seed
from rlhub.envs.vector.lockstep import LockStep, make_vector_env
from tests.support.vector_simulators import Drift, Stateless

RIGHT = np.ones((3, 8, 2), np.float32)


def drifts(num_envs: int = 3, **settings: object) -> LockStep:
    return LockStep(lambda: Drift(**settings), num_envs)  # type: ignore[arg-type]


def test_a_chunk_is_a_loop_over_steps_that_stops_at_the_end() -> None:
    env, plain = drifts(), [Drift() for _ in range(3)]
    env.reset(seeds=[1, 2, 3])
    for number, simulator in enumerate(plain):
        simulator.reset(number + 1, None)
    result = env.chunk_step(RIGHT)
    for row, simulator in enumerate(plain):
        for place in range(8):
            if place and (result.terminated | result.truncated)[row, :place].any():
                assert not result.valid[row, place] and result.reward[row, place] == 0
                continue
            outcome = simulator.step(RIGHT[row, place])
            assert result.valid[row, place] and result.reward[row, place] == np.float32(outcome.reward)
            assert result.terminated[row, place] == outcome.terminated and result.info[row]["away"] >= 0
    assert result.ended.any() and np.array_equal(result.success, result.terminated.any(axis=1))


def test_an_ended_episode_shows_its_end_and_the_next_beginning() -> None:
    env = drifts(max_steps=3, chunk=8)
    first = env.reset(seeds=[1, 2, 3], initial=[0, 0, 0])
    result = env.chunk_step(np.zeros((3, 5, 2), np.float32))
    assert result.truncated.tolist() == [[False, False, True, False, False]] * 3 and not result.terminated.any()
    assert result.valid.sum() == 9 and result.final_obs.seed.tolist() == [1, 2, 3]
    assert result.final_obs.instruction == first.instruction
    fresh = drifts().reset(seeds=[next_seed(seed) for seed in (1, 2, 3)])
    assert np.array_equal(result.obs.images, fresh.images) and result.obs.instruction == fresh.instruction
    assert result.obs.seed.tolist() == fresh.seed.tolist() and not np.array_equal(result.final_obs.state, fresh.state)


def test_without_automatic_resets_an_environment_waits() -> None:
    env = LockStep(lambda: Drift(max_steps=3), 2, auto_reset=False)
    env.reset(seeds=[1, 2])
    ended = env.chunk_step(RIGHT[:2])
    assert ended.ended.all() and np.array_equal(ended.obs.images, ended.final_obs.images) and ended.num_rendered == 2
    later = env.chunk_step(RIGHT[:2])
    assert not later.valid.any() and not later.ended.any() and later.num_rendered == 0
    assert np.array_equal(later.obs.images, ended.obs.images) and np.array_equal(later.obs.state, ended.obs.state)
    env.reset([1], seeds=[9])
    assert env.chunk_step(RIGHT[:2]).valid.any(axis=1).tolist() == [False, True]


def test_the_last_observation_costs_one_rendering_and_all_cost_one_each() -> None:
    env = drifts()
    env.reset(seeds=[1, 2, 3])
    counts = []
    for kind in ("last", "all"):
        before = Drift.observed
        result = env.chunk_step(np.zeros((3, 8, 2), np.float32), kind)  # type: ignore[arg-type]
        counts.append(Drift.observed - before)
        assert result.num_rendered == counts[-1] and not result.ended.any()
    assert counts == [3, 27]


def test_seeds_of_an_environment_do_not_repeat() -> None:
    seeds = [0]
    for _ in range(10_000):
        seeds.append(next_seed(seeds[-1]))
    assert len(set(seeds)) == len(seeds) and min(seeds) >= 0 and max(seeds) < 2**63


def test_errors_say_what_is_wrong() -> None:
    env = drifts()
    with pytest.raises(EnvError, match=r"chunk_step before reset of the environments \[0, 1, 2\]"):
        env.chunk_step(RIGHT)
    env.reset(seeds=[1, 2, 3])
    with pytest.raises(ValueError, match=r"shape \(3, 1 to 8, 2\)"):
        env.chunk_step(RIGHT[:2])
    with pytest.raises(ValueError, match="not finite"):
        env.chunk_step(np.full_like(RIGHT, np.inf))
    with pytest.raises(ValueError, match="different numbers from 0 to 2"):
        env.reset([0, 0], seeds=[1, 2])
    with pytest.raises(ValueError, match="seeds has 1 entries for 3 environments"):
        env.reset(seeds=[1])
    with pytest.raises(ValueError, match="one of the 6"):
        env.reset(seeds=[1, 2, 3], initial=[0, 1, 6])
    with pytest.raises(EnvError, match="low < high"):
        VectorSpec(action_dim=1, low=(1.0,), high=(1.0,), max_steps=1)
    with pytest.raises(EnvError, match="cannot save its state"):
        stateless = LockStep(Stateless, 2)
        stateless.reset(seeds=[1, 2])
        stateless.get_state()
    env.close()
    env.close()
    with pytest.raises(EnvError, match="closed"):
        env.reset(seeds=[1, 2, 3])


def test_a_file_names_an_environment(tmp_path: object) -> None:
    env = make_vector_env("tests/support/vector_simulators.py:Drift", {"size": 4}, 2, chunk=3)
    assert env.spec.chunk == 3 and env.reset(seeds=[1, 2]).images.shape == (2, 2, 4, 4, 3)
