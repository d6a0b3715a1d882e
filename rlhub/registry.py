"""Registries of named parts, which load on first use: one file and one registration add an algorithm, engine, reward or tracker.

A row of a `Registry` has either the object itself (decorator) or a `"module:attribute"` string, which is imported on first use.
Rows have what callers need before they import a part: `requires` (batch columns or roles that the part needs) and the knobs'
class as a string, so that `--help` and the checks before the start load no torch.

A part's knobs are a dataclass in its own file.  The value of a knob comes from the part's free-form kwargs
(`algorithm.adv_kwargs`, `actor.policy_loss.kwargs`), else from the field of the same name in the part's config section, else from
the dataclass's default.  So established keys such as `algorithm.gamma` reach every algorithm with a knob of that name, and no
algorithm is named here.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rlhub.errors import ConfigError, RegistryError

T = TypeVar("T")
K = TypeVar("K")


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns `"; did you mean 'grpo'?"` with the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def load_object(target: str) -> Any:
    """Imports the module of `"package.module:attribute"` and returns the attribute."""
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise RegistryError(f"{target!r} is not of the form 'module:attribute'")
    value: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


@dataclass(slots=True, kw_only=True)
class Row(Generic[T]):
    """One registered part.

    target: the part, or its "module:attribute" string; requires: the names of what the part needs, in its registry's own terms;
    knobs: the dataclass of its knobs; companions: further functions of the part by role, as objects or such strings.
    """

    name: str
    target: str | T
    requires: frozenset[str] = frozenset()
    knobs: str | type | None = None
    companions: Mapping[str, Any] = field(default_factory=dict)


class Registry(Generic[T]):
    """Maps names to parts.  kind: the noun for a part in errors, for example "advantage estimator"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._rows: dict[str, Row[T]] = {}

    def register(
        self,
        name: str,
        *,
        requires: Iterable[str] = (),
        knobs: str | type | None = None,
        companions: Mapping[str, Any] | None = None,
    ) -> Callable[[T], T]:
        """Returns a decorator that registers the decorated object under `name`."""

        def decorate(value: T) -> T:
            row = Row(name=name, target=value, requires=frozenset(requires), knobs=knobs, companions=companions or {})
            self._add(row)
            return value

        return decorate

    def add_lazy(
        self,
        name: str,
        target: str,
        *,
        requires: Iterable[str] = (),
        knobs: str | None = None,
        companions: Mapping[str, str] | None = None,
    ) -> None:
        """Registers `"module:attribute"` under `name`; the first `get` imports it."""
        self._add(Row(name=name, target=target, requires=frozenset(requires), knobs=knobs, companions=companions or {}))

    def _add(self, row: Row[T]) -> None:
        old = self._rows.get(row.name)
        if old is not None and not _same_target(old.target, row.target):
            raise RegistryError(f"{self.kind} {row.name!r} is registered twice: {old.target!r} and {row.target!r}")
        self._rows[row.name] = row

    def row(self, name: str) -> Row[T]:
        """Returns the row of a name, without importing the part.  Raises RegistryError for an unknown name."""
        if name not in self._rows:
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise RegistryError(
                f"no {self.kind} {name!r}{suggest(name, self._rows) or ';'} known: {', '.join(sorted(self._rows))}. "
                f"To add {article} {self.kind} of your own, register it in a module named in trainer.plugins."
            )
        return self._rows[name]

    def get(self, name: str) -> T:
        """Returns the part, and imports it if needed."""
        row = self.row(name)
        if isinstance(row.target, str):
            row.target = load_object(row.target)
        return row.target  # type: ignore[return-value]

    def knobs_class(self, name: str) -> type | None:
        """Imports and returns the dataclass of the part's knobs, or None."""
        row = self.row(name)
        return load_object(row.knobs) if isinstance(row.knobs, str) else row.knobs

    def companion(self, name: str, role: str) -> Any | None:
        """Imports and returns the part's companion in that role, or None."""
        companion = self.row(name).companions.get(role)
        return load_object(companion) if isinstance(companion, str) else companion

    def names(self) -> list[str]:
        """Returns the registered names, sorted."""
        return sorted(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows


def _same_target(old: Any, new: Any) -> bool:
    """Returns True where both are the same part; a module that registers its part on import may replace the part's lazy row."""
    if isinstance(old, str) and not isinstance(new, str):
        return old == f"{getattr(new, '__module__', '')}:{getattr(new, '__qualname__', '')}"
    if isinstance(new, str) and not isinstance(old, str):
        return _same_target(new, old)
    return bool(old == new)


def knobs_for(cls: type[K] | None, section: Any, kwargs: Mapping[str, Any], *, where: str) -> K | None:
    """Returns an instance of the knobs' dataclass `cls` (None: the algorithm has no knobs).

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
