"""Memory that several processes map by a name, which may be removed once all have."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhub.utils.shared_segments import new_segment_path, open_segment

READER = """
import mmap, os, sys

segment = mmap.mmap(os.open(sys.argv[1], os.O_RDWR), 0)
assert list(segment[:3]) == [1, 2, 3]
segment[-1] = 77
"""


@pytest.fixture
def path() -> Iterator[Path]:
    found = new_segment_path()
    yield found
    found.unlink(missing_ok=True)


def test_another_process_reads_and_writes_the_same_memory(path: Path) -> None:
    segment = open_segment(path, create_bytes=10_000)
    assert segment is not None and len(segment) == 10_000 and not segment.any()
    segment[:3] = [1, 2, 3]
    subprocess.run([sys.executable, "-c", READER, str(path)], check=True)
    path.unlink()
    assert segment[-1] == 77, "the memory outlives its name"


def test_what_the_machine_refuses_is_none(path: Path) -> None:
    assert open_segment(path) is None, "there is no such file"
    assert open_segment(path, create_bytes=1 << 50) is None, "no machine has as much memory"
    path.unlink(missing_ok=True)
    assert open_segment(path, create_bytes=1) is not None
    assert open_segment(path, create_bytes=1) is None, "the name is taken"


def test_names_are_new() -> None:
    assert len({new_segment_path() for _ in range(100)}) == 100
