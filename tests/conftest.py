"""Of all tests: the garbage collector leaves alone what collecting them imports, and no drawn example has a deadline.

What is imported are millions of objects which stay until the end; looking through them again and again costs a quarter of the
collection, in every worker, and more in the tests.

The speed of the machine may not decide whether a test passes; hypothesis has a deadline of 0.2 s an example.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
