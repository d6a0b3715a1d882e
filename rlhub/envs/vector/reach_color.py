"""reach_color: a hand must touch the target whose colour the instruction names, seen from above.

The hand moves on two slide joints; a red and a blue target lie on a grey floor.  An action is the wish to move, in each direction
from -1 to 1 times REACH.  The hand within RADIUS of the named target ends the episode with success, within RADIUS of the other
one as a failure.  The reward is twice the decrease of the distance to the named target, and 1 for success.  The initial state k
has the scene k // 2 and names red for even k, blue for odd k.

The light is even and the floor mid-grey: a small policy learns from such pictures several times as fast as from shaded ones.

It needs the extra: pip install 'rlhub[envs]'.
"""

from __future__ import annotations

import atexit
import functools
import json
from typing import Any

import numpy as np

from rlhub.envs.vector.base import StepOutcome, VectorSpec, render_without_display
from rlhub.errors import LoadError

render_without_display()
try:
    import mujoco
except ImportError as missing:
    raise LoadError("reach_color needs the package mujoco: pip install 'rlhub[envs]'") from missing

REACH = 0.35  # the distance that an action may ask for
PHYSICS_STEPS = 8  # per action
RADIUS = 0.22
FROM_HAND, APART = 0.45, 0.6  # smallest distances at the start
FIELD = 0.9  # coordinates at the start are at most this
SCENES = 256
SCENE_SEED = 20_251  # of the fixed initial states; episodes by seed draw from other streams
COLORS = ("red", "blue")
XML = """
<mujoco>
  <option timestep="0.02" integrator="implicitfast"/>
  <visual>
    <quality numslices="10" numstacks="6" numquads="1" shadowsize="0" offsamples="0"/>
    <headlight ambient="1 1 1" diffuse="0 0 0" specular="0 0 0"/>
  </visual>
  <worldbody>
    <camera name="top" pos="0 0 3.2" fovy="38"/>
    <geom type="box" size="1.4 1.4 0.02" pos="0 0 -0.02" rgba="0.5 0.5 0.5 1" contype="0" conaffinity="0"/>
    <body name="red" mocap="true"><geom type="cylinder" size="0.16 0.02" rgba=".9 .1 .1 1" contype="0" conaffinity="0"/></body>
    <body name="blue" mocap="true"><geom type="cylinder" size="0.16 0.02" rgba=".1 .1 .9 1" contype="0" conaffinity="0"/></body>
    <body name="hand" pos="0 0 0.1">
      <joint name="x" type="slide" axis="1 0 0" range="-1.1 1.1" limited="true" damping="4"/>
      <joint name="y" type="slide" axis="0 1 0" range="-1.1 1.1" limited="true" damping="4"/>
      <geom type="box" size="0.09 0.09 0.05" rgba="0.95 0.95 0.95 1" mass="0.2" contype="0" conaffinity="0"/>
    </body>
  </worldbody>
  <actuator><position joint="x" kp="40"/><position joint="y" kp="40"/></actuator>
</mujoco>
"""


class ReachColor:
    """One hand with two targets.  size: pixels of a picture's side.  slip: the share of actions that a random one replaces."""

    def __init__(self, *, size: int = 32, max_steps: int = 8, slip: float = 0.0) -> None:
        self.spec = VectorSpec(
            cameras=("top",),
            height=size,
            width=size,
            state_dim=4,
            action_dim=2,
            low=(-1.0, -1.0),
            high=(1.0, 1.0),
            chunk=2,
            max_steps=max_steps,
            language=True,
            state="exact",
            initial_states=2 * SCENES,
        )
        self._slip = slip
        self._model, self._renderer = _scene(size)
        self._data = mujoco.MjData(self._model)
        self._rng = np.random.default_rng(0)
        self._color = 0

    def reset(self, seed: int, initial: int | None) -> str:
        self._rng = np.random.default_rng([seed, 1])
        scene = np.random.default_rng([seed, 0] if initial is None else [SCENE_SEED, 2, initial // 2])
        self._color = int(scene.integers(2)) if initial is None else initial % 2
        mujoco.mj_resetData(self._model, self._data)
        hand, *targets = _places(scene)
        self._data.qpos[:], self._data.ctrl[:] = hand, hand
        for target, place in enumerate(targets):
            self._data.mocap_pos[target] = (*place, 0.02)
        return f"touch {COLORS[self._color]}"

    def step(self, action: np.ndarray) -> StepOutcome:
        if self._slip and self._rng.random() < self._slip:
            action = self._rng.uniform(-1.0, 1.0, 2)
        before = self._distances()
        self._data.ctrl[:] = self._data.qpos + REACH * np.asarray(action, np.float64)
        mujoco.mj_step(self._model, self._data, PHYSICS_STEPS)
        after = self._distances()
        success, failure = bool(after[0] < RADIUS), bool(after[1] < RADIUS)
        reward = 2.0 * (before[0] - after[0]) + success
        return StepOutcome(reward=float(reward), terminated=success or failure, success=success)

    def observe(self, images: np.ndarray, state: np.ndarray) -> None:
        state[:2], state[2:] = self._data.qpos, self._data.qvel
        # After a step, positions of bodies are those before it; mj_forward would change the solver's warm start.
        mujoco.mj_kinematics(self._model, self._data)
        mujoco.mj_camlight(self._model, self._data)
        self._renderer.update_scene(self._data, camera="top")
        images[0] = self._renderer.render()

    def get_state(self) -> bytes:
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(mujoco.mj_stateSize(self._model, kind))
        mujoco.mj_getState(self._model, self._data, physics, kind)
        return json.dumps([self._color, self._rng.bit_generator.state, physics.tolist()]).encode()

    def load_state(self, state: bytes) -> None:
        self._color, self._rng.bit_generator.state, physics = json.loads(state)
        mujoco.mj_setState(self._model, self._data, np.asarray(physics), mujoco.mjtState.mjSTATE_INTEGRATION)

    def close(self) -> None:
        """Keeps the renderer, which all simulators of this process share."""

    def expert_action(self, color: int | None = None) -> np.ndarray:
        """Returns the scripted expert's action, (2,) float32: straight to the named target (or that of `color`, an index of
        COLORS), around the other one."""
        color = self._color if color is None else color
        hand, target, other = self._data.qpos, self._target(color), self._target(1 - color)
        way = target - hand
        gap = other - hand
        along = float(np.clip(gap @ way / max(way @ way, 1e-9), 0.0, 1.0))
        side = along * way - gap  # from the other target to the nearest point of the way
        clearance = float(np.linalg.norm(side))
        if 0.0 < along < 1.0 and clearance < 1.6 * RADIUS:
            around = side / clearance if clearance > 1e-6 else np.array([-way[1], way[0]]) / np.linalg.norm(way)
            way = other + 1.9 * RADIUS * around - hand
        action: np.ndarray = np.clip(way / REACH, -1.0, 1.0).astype(np.float32)
        return action

    def _target(self, color: int) -> np.ndarray:
        return np.asarray(self._data.mocap_pos[color, :2])

    def _distances(self) -> tuple[float, float]:
        """Returns the hand's distances from the named and from the other target."""
        hand = self._data.qpos
        named, other = (float(np.linalg.norm(hand - self._target(color))) for color in (self._color, 1 - self._color))
        return named, other


def _places(rng: np.random.Generator) -> np.ndarray:
    """Draws the places (3, 2) of hand, red and blue target until they are far enough from each other."""
    while True:
        places = rng.uniform(-FIELD, FIELD, (3, 2))
        hand, red, blue = places
        if min(np.linalg.norm(hand - red), np.linalg.norm(hand - blue)) > FROM_HAND and np.linalg.norm(red - blue) > APART:
            return places


@functools.cache
def _scene(size: int) -> tuple[Any, Any]:
    """Returns the model and its renderer, one for all simulators of a process: a renderer has a context and 100 MB of its own."""
    model = mujoco.MjModel.from_xml_string(XML)
    renderer = mujoco.Renderer(model, size, size)
    atexit.register(renderer.close)  # while the libraries that it needs are loaded
    return model, renderer
