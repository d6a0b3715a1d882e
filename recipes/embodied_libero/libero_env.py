"""LIBERO as an environment in lock-step: a Panda arm on a table, two cameras, an instruction (Liu et al. 2023).

It runs in the Python environment that setup_env.sh makes.  Positions and velocities alone do not continue a trajectory, because
the arm's controller has a state of its own; so a state is the history, which is executed again.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from rlhub.envs.base import EnvError
from rlhub.envs.vector.base import StepOutcome, VectorSpec, render_without_display

render_without_display()
from libero.libero import benchmark, get_libero_path  # noqa: E402  # how it renders is set before
from libero.libero.envs import OffScreenRenderEnv  # noqa: E402

CAMERAS = ("agentview", "robot0_eye_in_hand")
PROPRIOCEPTION = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
STATE_DIM = 9
ACTION_DIM = 7  # change of position and rotation of the gripper, and its opening


class LiberoSimulator:
    """One task of a LIBERO benchmark.  size: pixels of a picture's side.  settle: steps without motion at the start, in which
    objects come to rest.  An initial state is one of those that the benchmark fixes; without a number, the seed chooses one."""

    def __init__(
        self,
        *,
        suite: str = "libero_spatial",
        task: int = 0,
        size: int = 64,
        max_steps: int = 220,
        chunk: int = 8,
        settle: int = 5,
    ) -> None:
        known = benchmark.get_benchmark_dict()
        if suite not in known:
            raise EnvError(f"LIBERO has no benchmark {suite!r}; known: {', '.join(sorted(known))}")
        tasks = known[suite]()
        if not 0 <= task < tasks.n_tasks:
            raise EnvError(f"{suite} has the tasks 0 to {tasks.n_tasks - 1}, not {task}")
        self._task, self._starts = tasks.get_task(task), np.asarray(tasks.get_task_init_states(task))
        file = os.path.join(get_libero_path("bddl_files"), self._task.problem_folder, self._task.bddl_file)
        # Cameras are no observations here: robosuite would render them in every step.
        self._env = OffScreenRenderEnv(bddl_file_name=file, use_camera_obs=False, hard_reset=False)
        self._size, self._settle, self._seen = size, settle, dict[str, Any]()
        self.spec = VectorSpec(
            cameras=CAMERAS,
            height=size,
            width=size,
            state_dim=STATE_DIM,
            action_dim=ACTION_DIM,
            low=(-1.0,) * ACTION_DIM,
            high=(1.0,) * ACTION_DIM,
            chunk=chunk,
            max_steps=max_steps,
            language=True,
            state="replay",
            initial_states=len(self._starts),
        )

    def reset(self, seed: int, initial: int | None) -> str:
        np.random.seed(seed % 2**32)  # robosuite draws from numpy's own stream
        self._env.reset()
        self._seen = self._env.set_init_state(self._starts[seed % len(self._starts) if initial is None else initial])
        for robot in self._env.env.robots:  # what robosuite keeps over a reset that does not build the model anew
            robot.gripper.current_action[:] = 0
            robot.controller.update(force=True)
            robot.controller.reset_goal()
        for _ in range(self._settle):
            self._seen, *_ = self._env.step([0.0] * ACTION_DIM)
        return str(self._task.language)

    def step(self, action: np.ndarray) -> StepOutcome:
        self._seen, reward, done, _ = self._env.step(action.tolist())
        return StepOutcome(reward=float(reward), terminated=bool(done), success=bool(done))

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        state[:] = np.concatenate([self._seen[name] for name in PROPRIOCEPTION])
        for number, camera in enumerate(CAMERAS):
            rendered = self._env.sim.render(camera_name=camera, width=self._size, height=self._size)
            images[number] = rendered[::-1]  # OpenGL's first row is the lowest

    def get_state(self) -> bytes:
        raise EnvError("the state of LIBERO is replayed")

    def load_state(self, state: bytes) -> None:
        raise EnvError("the state of LIBERO is replayed")

    def close(self) -> None:
        self._env.close()
