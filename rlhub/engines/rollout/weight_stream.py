"""Applying a stream of weight buckets so that a wrong or broken stream cannot pass for a whole update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from rlhub.engines.rollout.base import WeightBucket
from rlhub.errors import EngineError

SHOWN_NAMES = 5  # how many names an error lists before it only counts


def apply_buckets(buckets: Iterable[WeightBucket], expected: Collection[str], load: Callable[[WeightBucket], None]) -> None:
    """Call `load` on every bucket; every expected name must come exactly once and no other.

    Raises EngineError naming the surplus, repeated or missing weights.
    """
    seen: set[str] = set()
    for bucket in buckets:
        names = [name for name, _ in bucket]
        surplus = [name for name in names if name not in expected]
        if surplus:
            raise EngineError(f"the weight stream holds names the engine does not have: {abbreviate(surplus)}")
        repeated = [name for i, name in enumerate(names) if name in seen or name in names[:i]]
        if repeated:
            raise EngineError(f"the weight stream holds weights twice: {abbreviate(repeated)}")
        seen.update(names)
        load(bucket)
    missing = [name for name in expected if name not in seen]
    if missing:
        raise EngineError(f"the weight stream ended without {len(missing)} weights: {abbreviate(missing)}")


def abbreviate(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
