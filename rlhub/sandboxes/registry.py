"""The registry of sandboxes, and a provider built from a setting.  Importing this module loads none of them.

sandbox: bwrap                                               # a registered name
sandbox: {name: bwrap, memory_gb: 2, read_only: [/data]}     # with limits and settings
sandbox: path/to/file.py:MySandboxes                         # a SandboxProvider of your own
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhub.errors import ConfigError, RlhubError
from rlhub.registry import Registry, suggest
from rlhub.sandboxes.base import SandboxLimits, SandboxProvider
from rlhub.utils.user_code import load_target

SANDBOXES: Registry[type[SandboxProvider]] = Registry("sandbox")
"""Name -> the provider's class; its fields and those of SandboxLimits are settings."""
SANDBOXES.add_lazy("bwrap", "rlhub.sandboxes.bwrap:BwrapProvider")
SANDBOXES.add_lazy("docker", "rlhub.sandboxes.docker:DockerProvider")


def load_sandbox(setting: str | Mapping[str, Any], *, where: str, **defaults: Any) -> SandboxProvider:
    """Returns the provider that a setting names, once it has been found to work on this machine.  where: the setting's name.
    defaults: settings of the caller, which those of the setting override.  Raises ConfigError with the reason and a remedy."""
    given = {"name": setting} if isinstance(setting, str) else dict(setting)
    name = given.pop("name", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}={setting!r}: expected a name, or a mapping with 'name' and settings")
    try:
        provider = _build(name, defaults | given)
        provider.check()
    except (RlhubError, TypeError) as error:
        raise ConfigError(f"{where}={name}: {error}") from error
    return provider


def _build(name: str, settings: Mapping[str, Any]) -> SandboxProvider:
    cls = load_target(name) if ":" in name else SANDBOXES.get(name)
    if not (isinstance(cls, type) and issubclass(cls, SandboxProvider)):
        raise ConfigError(f"it is a {type(cls).__name__}; expected a class derived from rlhub.sandboxes.base:SandboxProvider")
    bounds = {field.name for field in dataclasses.fields(SandboxLimits)}
    own = {field.name for field in dataclasses.fields(cls)} - {"limits"}
    if unknown := [key for key in settings if key not in bounds | own]:
        known = ", ".join(sorted(bounds | own))
        raise ConfigError([f"no such setting: {key}{suggest(key, bounds | own)}; known: {known}" for key in unknown])
    limits = SandboxLimits(**{key: value for key, value in settings.items() if key in bounds})
    return cls(limits=limits, **{key: value for key, value in settings.items() if key in own})
