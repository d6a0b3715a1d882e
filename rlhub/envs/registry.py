"""The registry of the environments that come with rlhub.  Importing this module loads none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhub.registry import Registry
from rlhub.utils.user_code import load_target

ENVIRONMENTS: Registry[Callable[..., Any]] = Registry("environment")
"""Name -> the class or function that builds the environment from its settings, passed as keyword arguments."""
ENVIRONMENTS.add_lazy("guess_number", "rlhub.envs.games:GuessNumber")
ENVIRONMENTS.add_lazy("grid_walk", "rlhub.envs.games:GridWalk")
ENVIRONMENTS.add_lazy("gymnasium", "rlhub.envs.gymnasium:GymnasiumEnvironment")
ENVIRONMENTS.add_lazy("gymnasium_vector", "rlhub.envs.gymnasium:GymnasiumSimulator")
ENVIRONMENTS.add_lazy("maniskill", "rlhub.envs.vector.maniskill:ManiSkillSimulator")
ENVIRONMENTS.add_lazy("reach_color", "rlhub.envs.vector.reach_color:ReachColor")


def environment_target(name: str) -> str:
    """Returns a registered name as `module:attribute`, which another process can load, and a path unchanged.  Raises
    RegistryError."""
    if ":" in name:
        return name
    target = ENVIRONMENTS.row(name).target
    return target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"


def environment_factory(name: str) -> Callable[..., Any]:
    """Returns the class or function that builds the environment.  Raises RegistryError or LoadError if there is none."""
    return load_target(name) if ":" in name else ENVIRONMENTS.get(name)
