"""Processes of an engine end when the one that owns it is gone, and a killed process group leaves no shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlhub.engines.rollout.vllm import environment
from rlhub.engines.rollout.vllm.environment import OWNER, child_variables, owner_pid

KILLED = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
from rlhub.engines.rollout.vllm.environment import start_resource_tracker
if {apart}:
    start_resource_tracker()
print(SharedMemory(create=True, size=64).name, flush=True)
os.killpg(0, signal.SIGKILL)
"""


def test_a_process_is_gone_when_it_has_ended_though_nobody_took_note() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert environment.lives(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not environment.lives(process.pid), "a zombie"
    process.communicate()
    assert not environment.lives(process.pid)


def test_it_ends_in_an_orderly_way_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    alive = iter([True, True, False])
    monkeypatch.setattr(environment, "lives", lambda pid: next(alive))
    monkeypatch.setattr(environment.time, "sleep", done.append)
    monkeypatch.setattr(environment.os, "kill", lambda pid, number: done.append((pid, number)))
    monkeypatch.setattr(environment.signal, "alarm", done.append)
    environment._watch(1)
    assert done == [environment.WATCH_S] * 2 + [environment.GRACE_S, (os.getpid(), signal.SIGTERM)]


def test_the_owner_and_strangers_watch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, owner in (({}, None), (child_variables(), os.getpid())):
        monkeypatch.delenv(OWNER, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert owner_pid() == owner
        environment.end_with_owner.__wrapped__()
    assert "owner-watch" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("apart", [True, False])
def test_shared_memory_goes_with_the_group_that_is_killed(apart: bool) -> None:
    command = [sys.executable, "-c", KILLED.format(apart=apart)]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[5])}
    process = subprocess.run(command, start_new_session=True, stdout=subprocess.PIPE, env=variables, text=True, check=False)
    segment = Path("/dev/shm") / process.stdout.strip()
    deadline = time.monotonic() + (30.0 if apart else 0.2)
    while segment.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert segment.exists() != apart
    segment.unlink(missing_ok=True)
