"""A process group that is killed leaves no shared memory where its tracker stands apart; with Python's own it does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

KILLED = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
from rlhub.engines.rollout.vllm.environment import start_resource_tracker
if {apart}:
    start_resource_tracker()
print(SharedMemory(create=True, size=64).name, flush=True)
os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.parametrize("apart", [True, False])
def test_shared_memory_goes_with_the_group_that_is_killed(apart: bool) -> None:
    command = [sys.executable, "-c", KILLED.format(apart=apart)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.run(command, start_new_session=True, stdout=subprocess.PIPE, env=environment, text=True, check=False)
    segment = Path("/dev/shm") / process.stdout.strip()
    deadline = time.monotonic() + (30.0 if apart else 0.2)
    while segment.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert segment.exists() != apart
    segment.unlink(missing_ok=True)
