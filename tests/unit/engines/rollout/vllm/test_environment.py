"""Processes of an engine end when the one that owns it is gone, in an orderly way first; the owner itself watches nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from rlhub.engines.rollout.vllm import environment as module
from rlhub.engines.rollout.vllm.environment import OWNER, child_variables, owner_pid


def test_a_process_is_gone_when_it_has_ended_though_nobody_took_note() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert module.lives(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not module.lives(process.pid), "a zombie"
    process.communicate()
    assert not module.lives(process.pid)


def test_it_ends_in_an_orderly_way_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    alive = iter([True, True, False])
    monkeypatch.setattr(module, "lives", lambda pid: next(alive))
    monkeypatch.setattr(module.time, "sleep", done.append)
    monkeypatch.setattr(module.os, "kill", lambda pid, number: done.append((pid, number)))
    monkeypatch.setattr(module.signal, "alarm", done.append)
    module._watch(1)
    assert done == [module.WATCH_S] * 2 + [module.GRACE_S, (os.getpid(), signal.SIGTERM)]


def test_the_owner_and_strangers_watch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for environment, owner in (({}, None), (child_variables(), os.getpid())):
        monkeypatch.delenv(OWNER, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        assert owner_pid() == owner
        module.end_with_owner.__wrapped__()
    assert "owner-watch" not in [thread.name for thread in threading.enumerate()]
