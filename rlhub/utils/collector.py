"""Python's garbage collector, kept away from where it only costs time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Turns the collector off while code makes millions of objects and not one cycle: it would walk them over and over."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def heap_set_aside() -> Iterator[None]:
    """Keeps all objects that live now, with everything that was imported, out of collections until the end of the block.

    torch and transformers alone are a million objects: a full collection stops every thread of the process for some 0.2 s, the
    event loop of the episodes among them.
    """
    gc.collect()  # or garbage would be kept too
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
