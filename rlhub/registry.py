"""Named, lazily loaded parts: how one file and one registration adds an algorithm, engine, reward or tracker.

A `Registry` row is either the object itself (decorator) or a `"module:attribute"` string that is imported on first use.
Rows carry what callers must know without importing anything heavy: `requires` (batch columns or roles the part needs) and
the knobs' class as a string, so `--help` and the checks before start load no torch.

A part's own knobs are a dataclass beside it.  A knob is looked up in the part's free-form kwargs (`algorithm.adv_kwargs`,
`actor.policy_loss.kwargs`), then as a field of the same name in the config section it belongs to, and else has the default of its
dataclass.  So established keys such as `algorithm.gamma` reach every algorithm that has a knob of that name, and no algorithm is
named here.
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
    """`"; did you mean 'grpo'?"` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def load_object(target: str) -> Any:
    """Import `"package.module:attribute"` and return the attribute."""
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise RegistryError(f"{target!r} is not of the form 'module:attribute'")
    value: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


@dataclass(slots=True, kw_only=True)
class Row(Generic[T]):
    """One registered part: its name, where it is, what it needs and where its knobs' dataclass is.

    companions: further functions of the same part by role, objects or "module:attribute" strings.
    """

    name: str
    target: str | T
    requires: frozenset[str] = frozenset()
    knobs: str | type | None = None
    companions: Mapping[str, Any] = field(default_factory=dict)


class Registry(Generic[T]):
    """Name -> part.  `kind` is the noun used in errors, for example "advantage estimator"."""

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
        """Decorator: register the decorated object under `name`."""

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
        """Register `"module:attribute"` under `name`; imported on the first `get`."""
        self._add(Row(name=name, target=target, requires=frozenset(requires), knobs=knobs, companions=companions or {}))

    def _add(self, row: Row[T]) -> None:
        old = self._rows.get(row.name)
        if old is not None and not _same_target(old.target, row.target):
            raise RegistryError(f"{self.kind} {row.name!r} is registered twice: {old.target!r} and {row.target!r}")
        self._rows[row.name] = row

    def row(self, name: str) -> Row[T]:
        """The row itself, without importing the part."""
        if name not in self._rows:
            article = "an" if self.kind[0] in "aeiou" else "a"
            raise RegistryError(
                f"no {self.kind} {name!r}{suggest(name, self._rows) or ';'} known: {', '.join(sorted(self._rows))}. "
                f"To add {article} {self.kind} of your own, register it in a module named in trainer.plugins."
            )
        return self._rows[name]

    def get(self, name: str) -> T:
        """The part, imported if needed."""
        row = self.row(name)
        if isinstance(row.target, str):
            row.target = load_object(row.target)
        return row.target  # type: ignore[return-value]

    def knobs_class(self, name: str) -> type | None:
        """The dataclass of the part's own knobs (imports it), or None."""
        row = self.row(name)
        return load_object(row.knobs) if isinstance(row.knobs, str) else row.knobs

    def companion(self, name: str, role: str) -> Any | None:
        """The part's companion in that role (imports it), or None."""
        companion = self.row(name).companions.get(role)
        return load_object(companion) if isinstance(companion, str) else companion

    def names(self) -> list[str]:
        return sorted(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows


def _same_target(old: Any, new: Any) -> bool:
    """A lazy row may be replaced by the very object it points to (its module registers itself on import)."""
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
