"""One entry of the tables in `foreign_keys` and `foreign_aliases`: a setting of other frameworks, and what it is worth here."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

ACTOR, REFERENCE = "actor_rollout_ref.actor.", "actor_rollout_ref.ref."
ROLLOUT, MODEL = "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
CORRECTION = "algorithm.rollout_correction."
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
MEGATRON_SECTIONS = tuple(f"{part}megatron." for part in (ACTOR, REFERENCE, "critic.", "reward_model.", ""))
TRAINED = (ACTOR, "critic.", "")
"""Beginnings of keys."""

ANY = object()
"""As an accepted value: whatever it says, it cannot matter."""
AS_DEFAULT = object()
"""As our value of a `Spelling`: as if the key had not been given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A key that is not ours.

    key: a pattern.  same: values that say what is the case anyway, accepted without a word (a text may be a pattern).
    as_key: a setting of ours whose value is as good as those.  Of any other value: note, why it is accepted and has no effect;
    or instead, why it is refused and what to use.
    """

    key: str
    same: tuple[Any, ...] = ()
    as_key: str = ""
    note: str = ""
    instead: str = ""

    def covers(self, key: str) -> bool:
        return fnmatchcase(key, self.key)

    def is_same(self, value: Any) -> bool:
        """bool and int are told apart: 1 is not a way to say True in a configuration."""
        return any(item is ANY or _equal(item, value) for item in self.same)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """Values that mean what we write otherwise, of the keys that fit a pattern."""

    key: str
    given: tuple[Any, ...]
    ours: Any

    def covers(self, key: str, value: Any) -> bool:
        return fnmatchcase(key, self.key) and any(_equal(item, value) for item in self.given)


def _equal(item: Any, value: Any) -> bool:
    if isinstance(item, str) and isinstance(value, str):
        return fnmatchcase(value, item)
    return type(item) is type(value) and bool(item == value)
