"""Keys that command lines written for other HybridFlow frameworks bring along; the tables are in `foreign_keys` and
`foreign_aliases`.

Four kinds: aliases (another spelling of a key or value of ours), keys whose value says what is the case here anyway (accepted
without a word), those that change nothing that is learned (accepted with a warning that says why), and keys of what this
version does not have (an error that names what to use instead, so nobody believes it is on).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from rlhub.config.aliases.keys import FOREIGN
from rlhub.config.aliases.names import ALIASES, REFUSED_VALUES, SPELLINGS
from rlhub.config.aliases.row import ANY, AS_DEFAULT, Foreign
from rlhub.config.schema import scalar, setting


def resolve_aliases(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """Flat settings with every alias under our own key; two spellings with different values are a problem.

    An alias that is given as an interpolation only says that it follows another setting, as it does here.
    """
    resolved: dict[str, Any] = {}
    for key, value in values.items():
        ours = _ours(key)
        if ours != key and _follows(value):
            continue
        value = _our_value(ours, value)
        if value is AS_DEFAULT:
            continue
        if ours in resolved and resolved[ours] != value:
            problems.append(f"{key}={value!r} and {ours}={resolved[ours]!r} are the same setting with different values")
        resolved[ours] = value
    return resolved


def _follows(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("${")


def _ours(key: str) -> str:
    for alias, ours in ALIASES.items():
        if key == alias or key.startswith(f"{alias}."):
            return ours + key[len(alias) :]
    return key


def _our_value(key: str, value: Any) -> Any:
    return next((spelling.ours for spelling in SPELLINGS if spelling.covers(key, value)), value)


def refused_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Of settings of ours those whose value is another framework's: key -> what to use instead."""
    return {
        key: f"{key}={value}: {instead}"
        for key, value in values.items()
        for pattern, refused, instead in REFUSED_VALUES
        if fnmatchcase(key, pattern) and refused in (value if isinstance(value, list) else [value])
    }


@functools.cache
def names_in_full(key: str) -> bool:
    """Whether the tables have exactly this key; inside a mapping whose keys are the user's own no pattern counts."""
    return key in ALIASES or any(row.key == key for row in FOREIGN)


@functools.cache
def _row(key: str) -> Foreign | None:
    return next((row for row in FOREIGN if row.covers(key)), None)


def judge(key: str, value: Any, said: Mapping[str, Any] | None = None) -> str | None:
    """For a key that is not ours: "" if the value is accepted, a message if it would matter, None if the key is unheard of.

    said: the settings given beside it.
    """
    row = _row(key)
    if row is None:
        return None
    if row.note or row.is_same(value) or _follows(value) or (row.as_key and (said or {}).get(row.as_key) == value):
        return ""
    harmless = " or ".join(scalar(item) for item in row.same if item is not ANY and _may_be_shown(item))
    return f"{setting(key, value)}: {row.instead}{f' (only {harmless} is accepted)' if harmless else ''}"


def _may_be_shown(value: Any) -> bool:
    """Not a pattern, and not an empty text, which would be no help."""
    return value != "" and not (isinstance(value, str) and "*" in value)


def note(key: str, value: Any) -> str:
    """For an accepted key that is not ours: why its value has no effect here, or "" where it says what is the case anyway."""
    row = _row(key)
    if row is None or not row.note or row.is_same(value) or _follows(value):
        return ""
    return f"{setting(key, value)} has no effect: {row.note}"
