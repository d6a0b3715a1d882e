"""Keeps Python's garbage collector away from code where it only costs time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Turns the collector off while code creates millions of objects and no cycle; it would scan them again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def heap_set_aside() -> Iterator[None]:
    """Excludes all objects that live now, including everything that was imported, from collections until the end of the block.

    torch and transformers alone create a million objects: a full collection stops every thread of the process for about 0.2 s,
    including the event loop of the episodes.
    """
    gc.collect()  # or garbage would be kept too
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
