"""The adapter of ManiSkill over a fake of its interface: it passes the suite, and says what is missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

gymnasium = pytest.importorskip("gymnasium")
import numpy as np  # noqa: E402

from rlhub.envs.base import EnvError  # noqa: E402
from rlhub.envs.registry import environment_factory  # noqa: E402
from rlhub.envs.vector.check import CHECKS, check_vector_env  # noqa: E402
from rlhub.envs.vector.lockstep import LockStep  # noqa: E402
from rlhub.errors import LoadError  # noqa: E402

ADAPTER = "rlhub.envs.vector.maniskill"
PACKAGE = (
    "mani_skill",
    "mani_skill.envs",
    "mani_skill.utils",
    "mani_skill.utils.wrappers",
    "mani_skill.utils.wrappers.gymnasium",
)


class FakeManiSkill(gymnasium.Env):  # type: ignore[misc, name-defined]  # gymnasium may be absent
    """A point that must come to rest at 0, with ManiSkill's arguments, and observations and infos as CPUGymWrapper gives them."""

    def __init__(
        self, *, num_envs: int, sim_backend: str, obs_mode: str, control_mode: str, sensor_configs: dict[str, int]
    ) -> None:
        assert (num_envs, sim_backend, obs_mode) == (1, "cpu", "rgb")
        if control_mode == "no_driver":
            raise RuntimeError("vk::createInstanceUnique: ErrorIncompatibleDriver")
        self.size = sensor_configs["width"]
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Dict({"agent": gymnasium.spaces.Box(-2.0, 2.0, (2,), np.float32)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.random = np.random.default_rng(seed)
        self.at, self.speed = self.random.uniform(-1, 1, 2).astype(np.float32), np.zeros(2, np.float32)
        return self.observed(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], Any, Any, bool, dict[str, Any]]:
        self.speed = (0.5 * self.speed + 0.2 * action + self.random.normal(0, 0.02, 2)).astype(np.float32)
        self.at = np.clip(self.at + self.speed, -1.5, 1.5)
        distance = np.abs(self.at).max()
        return self.observed(), -distance, distance < 0.05, False, {"success": distance < 0.05}

    def observed(self) -> dict[str, Any]:
        picture = np.full((self.size, self.size, 3), 40, np.uint8)
        row, column = ((self.at + 1.5) / 3 * (self.size - 1)).astype(int)
        picture[row, column] = 255
        agent = {"qpos": self.at.copy(), "qvel": self.speed.copy()}
        return {"agent": agent, "sensor_data": {"base_camera": {"rgb": picture}}, "sensor_param": {}}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ManiSkill is the fake."""
    for name in PACKAGE:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[PACKAGE[-1]].CPUGymWrapper = lambda env: env.unwrapped  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    gymnasium.register("FakePickCube-v1", FakeManiSkill)
    yield
    del gymnasium.registry["FakePickCube-v1"]
    sys.modules.pop(ADAPTER, None)


def make(**settings: Any) -> Any:
    return importlib.import_module(ADAPTER).ManiSkillSimulator(task="FakePickCube-v1", **settings)


def test_it_passes_the_suite(installed: None) -> None:
    env = LockStep(lambda: make(size=32, max_steps=12), 3)
    assert check_vector_env(env, chunks=20) == [check.__name__ for check in CHECKS]
    assert env.spec.language and env.reset(seeds=[1, 2, 3]).instruction[0].startswith("pick up the red cube")
    env.close()


def test_success_is_what_ends_an_episode(installed: None) -> None:
    env = make()
    env.reset(3, None)
    outcomes = [env.step(-3 * env._env.at - env._env.speed) for _ in range(40)]
    assert any(one.terminated and one.success for one in outcomes) and not outcomes[0].success


def test_an_unknown_camera_is_named(installed: None) -> None:
    with pytest.raises(EnvError, match="has no camera 'wrist'; known: base_camera"):
        make(camera="wrist")


def test_a_missing_driver_is_explained(installed: None) -> None:
    with pytest.raises(EnvError, match="FakePickCube-v1 cannot be built.*ErrorIncompatibleDriver.*needs Mesa 24.3 or later"):
        make(control_mode="no_driver")


def test_where_it_is_not_installed_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mani_skill", None)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    with pytest.raises(LoadError, match=r"needs the package mani_skill.*setup_env.sh maniskill.*env.manager=\{python"):
        environment_factory("maniskill")
