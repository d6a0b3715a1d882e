"""Memory that is freed stays with the process, so that the next step need not fetch it page by page."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from rlhub.utils import freed_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")

STEPS = """
import ctypes, resource, sys
from rlhub.utils.freed_memory import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes, libc.free.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], [ctypes.c_void_p]
kept = keep_freed_memory() if sys.argv[1] == "keep" else None

def step():  # blocks above and below 32 MB, from which on glibc takes each from the kernel
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    sizes = [megabytes * 2**20 for megabytes in (40, 10, 100, 20)]
    blocks = [libc.malloc(size) for size in sizes]
    for block, size in zip(blocks, sizes):
        libc.memset(block, 1, size)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first, *others = [step() for _ in range(4)]
print(kept, first, max(others))
"""
PAGES = 170 * 256  # of a step


def run(what: str, **variables: str) -> tuple[str, int, int]:
    """What `keep_freed_memory` returned, and the page faults of the first step and of the worst after it."""
    environment = {key: value for key, value in os.environ.items() if key not in freed_memory.USERS_SETTINGS} | variables
    command = [sys.executable, "-c", STEPS, what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    kept, first, others = done.stdout.split()
    return kept, int(first), int(others)


def test_later_steps_get_it_without_the_kernel() -> None:
    kept, first, others = run("keep")
    assert kept == "True" and others < PAGES / 20 < first
    _, _, given_back = run("give back")  # the control
    assert given_back > PAGES / 2


@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_user_has_tuned_stays(variable: str) -> None:
    value = {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}.get(variable, "131072")
    kept, _, others = run("keep", **{variable: value})
    assert kept == "False" and others > PAGES / 2


def test_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda _: pytest.fail("asked for its C library"))
    assert not freed_memory.keep_freed_memory()
