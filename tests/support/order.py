"""In which order two workers take the files of a suite."""

from __future__ import annotations

from collections import Counter

import pytest


def longest_first(items: list[pytest.Item], longest: tuple[str, ...]) -> None:
    """Sort tests in place: those of the files `longest` first, in that order, then files with many tests before files with few.

    A file runs in one worker from begin to end: a long one that starts last keeps one core busy while the other waits.
    """
    counts = Counter(item.path for item in items)
    places = {name: place for place, name in enumerate(longest)}
    items.sort(key=lambda item: (places.get(item.path.name, len(longest)), -counts[item.path], item.path))
