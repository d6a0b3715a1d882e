"""Of all tests: the garbage collector leaves alone what collecting them imports.

That are millions of objects which stay until the end; looking through them again and again costs a quarter of the collection,
in every worker, and more in the tests.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
