"""ManiSkill's tasks (Tao et al. 2024, arXiv 2410.00425) as environments in lock-step: a robot arm, an instruction, a camera.

ManiSkill brings its own torch, so it has a Python of its own, which `env.manager={python: ...}` names:

    bash recipes/embodied_libero/setup_env.sh maniskill

Its renderer is Vulkan; without a GPU it needs Mesa's lavapipe of version 24.3 or later.  Physics run on the CPU, one environment
at a time: an EnvManager has as many as it wants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlhub.envs.base import EnvError
from rlhub.envs.vector.base import StepOutcome, VectorSpec
from rlhub.errors import LoadError

try:
    import gymnasium
    import mani_skill.envs  # noqa: F401  # registers the tasks
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper
except ImportError as missing:
    raise LoadError(
        f"maniskill needs the package mani_skill ({missing}), in a Python of its own: "
        "bash recipes/embodied_libero/setup_env.sh maniskill, then set env.manager={python: .venv-maniskill/bin/python}"
    ) from missing

PROPRIOCEPTION = "agent"
"""The entry of an observation with the robot's joints."""


class ManiSkillSimulator:
    """One task.  task: its name for gymnasium.make.  instruction: a fixed text, since the tasks have none.

    size: pixels of a picture's side; camera: the sensor that takes it.  control_mode: the meaning of an action's numbers.

    A state is the history, which is executed again: controllers have a state of their own.
    """

    def __init__(
        self,
        *,
        task: str = "PickCube-v1",
        instruction: str = "pick up the red cube and move it to the green point",
        size: int = 64,
        camera: str = "base_camera",
        control_mode: str = "pd_ee_delta_pose",
        max_steps: int = 50,
        chunk: int = 4,
    ) -> None:
        self._env = CPUGymWrapper(_made(task, size, control_mode))
        self._camera, self._instruction = camera, instruction
        self._seen, _ = self._env.reset(seed=0)
        if camera not in (known := self._seen["sensor_data"]):
            raise EnvError(f"{task} has no camera {camera!r}; known: {', '.join(sorted(known))}")
        space = self._env.action_space
        self.spec = VectorSpec(
            cameras=(camera,),
            height=size,
            width=size,
            state_dim=len(self._joints()),
            action_dim=int(space.shape[0]),
            low=tuple(space.low.tolist()),
            high=tuple(space.high.tolist()),
            chunk=chunk,
            max_steps=max_steps,
            language=bool(instruction),
            state="replay",
        )

    def reset(self, seed: int, initial: int | None) -> str:
        self._seen, _ = self._env.reset(seed=seed % 2**31)  # numpy's generator, which ManiSkill seeds, takes no more bits
        return self._instruction

    def step(self, action: np.ndarray) -> StepOutcome:
        self._seen, reward, terminated, _, info = self._env.step(action.astype(np.float32))  # the spec has the time limit
        ended = bool(terminated)
        return StepOutcome(reward=float(reward), terminated=ended, success=ended and bool(info.get("success", False)))

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        images[0], state[:] = self._seen["sensor_data"][self._camera]["rgb"], self._joints()

    def _joints(self) -> np.ndarray:
        agent: Mapping[str, Any] = self._seen[PROPRIOCEPTION]
        return np.concatenate([np.ravel(agent[name]) for name in ("qpos", "qvel")]).astype(np.float32)

    def get_state(self) -> bytes:
        raise EnvError("the state of ManiSkill is replayed")

    def load_state(self, state: bytes) -> None:
        raise EnvError("the state of ManiSkill is replayed")

    def close(self) -> None:
        self._env.close()


def _made(task: str, size: int, control_mode: str) -> Any:
    options: dict[str, Any] = {"num_envs": 1, "sim_backend": "cpu", "obs_mode": "rgb", "control_mode": control_mode}
    try:
        return gymnasium.make(task, sensor_configs={"width": size, "height": size}, **options)
    except RuntimeError as error:  # sapien's, which names Vulkan's code only
        raise EnvError(f"{task} cannot be built ({error}); without a GPU its renderer needs Mesa 24.3 or later") from error
