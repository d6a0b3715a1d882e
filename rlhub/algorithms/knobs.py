"""An algorithm's own knobs, filled from the user's settings.

A knob is looked up in the algorithm's free-form kwargs (`algorithm.adv_kwargs`, `actor.policy_loss.kwargs`), then as a
field of the same name in the config section it belongs to, and else keeps the default of its dataclass.  So established
keys such as `algorithm.gamma` reach every algorithm that has a knob of that name, and no algorithm is named here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from rlhub.errors import ConfigError
from rlhub.registry import suggest

K = TypeVar("K")


def knobs_for(cls: type[K] | None, section: Any, kwargs: Mapping[str, Any], *, where: str) -> K | None:
    """An instance of the knobs' dataclass `cls` (None: the algorithm has no knobs).

    section: the config dataclass whose same-named fields are read; where: the key of `kwargs`, for errors.
    Raises ConfigError on an unknown knob or a value its dataclass refuses.
    """
    fields = {field.name for field in dataclasses.fields(cls)} if cls is not None else set()  # type: ignore[arg-type]
    unknown = [name for name in kwargs if name not in fields]
    if unknown:
        known = f"known: {', '.join(sorted(fields))}" if fields else "this algorithm has no knobs"
        raise ConfigError([f"{where}.{name}: no such knob{suggest(name, fields)}; {known}" for name in unknown])
    if cls is None:
        return None
    shared = {field.name for field in dataclasses.fields(section)} & fields
    values = {name: getattr(section, name) for name in shared} | dict(kwargs)
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error
