"""Of all tests: the garbage collector leaves alone what collecting them imports, and no drawn example has a deadline.

What is imported are millions of objects which stay until the end; looking through them again and again costs a quarter of the
collection, in every worker, and more in the tests.

The speed of the machine may not decide whether a test passes; hypothesis has a deadline of 0.2 s an example.

Nor may its processor: ATEN_CPU_CAPABILITY=avx2 or default has torch compute as on another.  Its cache of compiled code does not
know that and would mix code for vectors of several widths, which gives wrong numbers, so each has a cache of its own.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

if "ATEN_CPU_CAPABILITY" in os.environ:
    own_cache = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}_{os.environ['ATEN_CPU_CAPABILITY']}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", own_cache)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
