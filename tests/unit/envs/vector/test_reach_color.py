"""reach_color: the suite, the physics and the experts' rates."""

from __future__ import annotations

import json
from importlib.util import find_spec

import numpy as np
import pytest

if find_spec("mujoco") is None:  # not importorskip: how it renders is set before its import
    pytest.skip("the extra 'envs' is not installed: bash scripts/setup_env.sh", allow_module_level=True)

from rlhub.envs.base import EnvError
from rlhub.envs.vector.check import check_vector_env
from rlhub.envs.vector.lockstep import LockStep, make_vector_env
from rlhub.envs.vector.reach_color import COLORS, FROM_HAND, ReachColor

EPISODES = 128


class QposOnly(ReachColor):
    """A fault: the state has the positions alone, without velocities and the solver's warm start."""

    def get_state(self) -> bytes:
        return json.dumps([self._color, self._rng.bit_generator.state, self._data.qpos.tolist()]).encode()

    def load_state(self, state: bytes) -> None:
        self._color, self._rng.bit_generator.state, positions = json.loads(state)
        self._data.qpos[:] = positions


@pytest.mark.parametrize("slip", [0.0, 0.3])
def test_the_suite_passes(slip: float) -> None:
    env = make_vector_env("reach_color", {"slip": slip}, 3)
    check_vector_env(env, chunks=100)


def test_positions_alone_are_no_state() -> None:
    with pytest.raises(EnvError, match="states_continue_exactly"):
        check_vector_env(LockStep(QposOnly, 3), chunks=100)


def success(policy: str, slip: float = 0.0) -> float:
    """The share of the first fixed episodes that a scripted policy solves."""
    simulators: list[ReachColor] = []

    def make() -> ReachColor:
        simulators.append(ReachColor(slip=slip))
        return simulators[-1]

    env = LockStep(make, EPISODES, chunk=1, auto_reset=False)
    env.reset(seeds=range(EPISODES), initial=range(EPISODES))
    rng, solved = np.random.default_rng(0), np.zeros(EPISODES, bool)
    told = rng.integers(2, size=EPISODES)
    for _ in range(env.spec.max_steps):
        actions = rng.uniform(-1, 1, (EPISODES, 1, 2))
        for row, simulator in enumerate(simulators):
            if policy != "random":
                actions[row, 0] = simulator.expert_action(None if policy == "expert" else int(told[row]))
        solved |= env.chunk_step(actions).success
    return float(solved.mean())


def test_an_expert_solves_it_and_needs_the_instruction() -> None:
    assert success("expert") >= 0.95
    assert 0.3 <= success("deaf") <= 0.65
    assert success("random") <= 0.2


def test_an_initial_state_is_a_scene_and_a_color() -> None:
    env = make_vector_env("reach_color", {}, 4)
    obs = env.reset(seeds=[1, 2, 3, 4], initial=[6, 7, 6, 8])
    assert obs.instruction == [f"touch {COLORS[number]}" for number in (0, 1, 0, 0)]
    assert np.array_equal(obs.images[0], obs.images[1]) and np.array_equal(obs.images[0], obs.images[2])
    assert not np.array_equal(obs.images[0], obs.images[3])


def test_the_picture_shows_both_targets_and_the_hand() -> None:
    obs = make_vector_env("reach_color", {"size": 64}, 2).reset(seeds=[1, 2])
    for image in obs.images[:, 0].astype(int):
        red, green, blue = (image[..., channel] for channel in range(3))
        assert (red - blue > 60).sum() > 20 and (blue - red > 60).sum() > 20 and (np.minimum(green, red) > 180).sum() > 10
    assert FROM_HAND > 0.4
