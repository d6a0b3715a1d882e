"""Starting Ray where its processes take longer than Ray waits for them; a fake `ray.init`."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray._private.node import Node

from rlhub.errors import ResourceError
from rlhub.single_controller.ray import cluster


class FakeInit:
    """Times out `failures` times, each time with a process left behind; the bystander is not Ray's."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.failures = failures
        self.timed_out = error is None
        self.error = error or Exception(f"{cluster.TIMED_OUT}. This could happen because ...")
        self.left: list[subprocess.Popen[bytes]] = []
        self.ended: list[int] = []  # without our doing

    def __call__(self, **options: Any) -> None:
        if len(self.left) < self.failures:
            self.left.append(sleeper(f"{cluster.RAYS_FOLDER}raylet"))
            raise self.error


def without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is there to ask, to watch or to end."""
    for name in ("describe_nodes", "watch_cluster", "_start_reaper"):
        monkeypatch.setattr(cluster, name, lambda *_, **__: None)
    monkeypatch.setattr(cluster, "head_address", lambda: "127.0.0.1:1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def sleeper(name: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)", name])


def connect(monkeypatch: pytest.MonkeyPatch, fake: FakeInit, deadline_s: float = 120.0) -> cluster.Connection:
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", fake)
    without_a_cluster(monkeypatch)
    bystander = sleeper("bystander")
    try:
        return cluster.connect({}, device="cpu", num_ranks=1, deadline_s=deadline_s)
    finally:
        left = [psutil.Process(process.pid) for process in fake.left]
        fake.ended = [process.pid for process in psutil.wait_procs(left, timeout=60.0 if fake.timed_out else 0.3)[0]]
        assert bystander.poll() is None
        for process in (bystander, *fake.left):
            process.kill()
            process.wait()


def test_it_is_tried_again_and_what_was_started_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeInit(2)
    assert connect(monkeypatch, fake).owned
    assert set(fake.ended) == {process.pid for process in fake.left} and len(fake.ended) == 2


def test_a_process_without_arguments_yet_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux shows it for a moment after its start."""
    asked: Counter[int] = Counter()
    cmdline = psutil.Process.cmdline

    def late(process: psutil.Process) -> list[str]:
        asked[process.pid] += 1
        return [] if asked[process.pid] <= 3 else cmdline(process)

    monkeypatch.setattr(psutil.Process, "cmdline", late)
    fake = FakeInit(1)
    assert connect(monkeypatch, fake).owned
    assert fake.ended == [process.pid for process in fake.left] and asked[fake.left[0].pid] > 3


def test_after_some_attempts_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeInit(9)
    with pytest.raises(ResourceError, match="3 times in a row.*busy"):
        connect(monkeypatch, fake)
    assert len(fake.left) == cluster.START_ATTEMPTS


def test_after_the_deadline_it_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeInit(9)
    with pytest.raises(
        ResourceError, match="^cannot start Ray here: its processes .* 1 times in a row .trainer.deadline_s.resources is 0 s"
    ):
        connect(monkeypatch, fake, deadline_s=0.0)
    assert len(fake.left) == 1


def test_other_errors_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeInit(9, RuntimeWarning("something else"))
    with pytest.raises(RuntimeWarning, match="something else"):
        connect(monkeypatch, fake)
    assert len(fake.left) == 1 and not fake.ended


@pytest.mark.parametrize("own", [True, False])
def test_sigterm_stays_the_programs(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """ray.init puts its own handler, which exits, in the place of one that saves the step first."""
    handlers = {name: lambda *_: None for name in ("program", "ray")}
    former = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, handlers["program"] if own else signal.SIG_DFL)
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", lambda **options: signal.signal(signal.SIGTERM, handlers["ray"]))
    without_a_cluster(monkeypatch)
    try:
        cluster.connect({}, device="cpu", num_ranks=1)
        assert signal.getsignal(signal.SIGTERM) is handlers["program" if own else "ray"]
    finally:
        signal.signal(signal.SIGTERM, former)


HELPERS = {"start_api_server", "start_monitor", "start_log_monitor"}


@pytest.mark.parametrize(
    ("options", "started"),
    [
        ({}, set()),
        ({"include_dashboard": True}, {"start_api_server", "start_monitor"}),
        ({"include_dashboard": None}, {"start_api_server", "start_monitor"}),
        ({"log_to_driver": True}, {"start_log_monitor"}),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
def test_only_the_helper_processes_that_are_asked_for_are_started(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], started: set[str], fails: bool
) -> None:
    seen: set[str] = set()
    named: list[bytes] = []
    client = SimpleNamespace(internal_kv_put=lambda key, *_, **__: named.append(key))
    node = SimpleNamespace(get_gcs_client=lambda: client)

    def init(**_: Any) -> None:
        Node.start_api_server(node, include_dashboard=False, raise_on_failure=False)
        Node.start_monitor(node)
        Node.start_log_monitor(node)
        if fails:
            raise RuntimeError("no")

    for helper in HELPERS:
        monkeypatch.setattr(Node, helper, lambda node, name=helper, **_: seen.add(name))
    methods = {helper: getattr(Node, helper) for helper in HELPERS}
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", init)
    without_a_cluster(monkeypatch)
    with pytest.raises(ResourceError) if fails else nullcontext():
        cluster.connect(options, device="cpu", num_ranks=1)
    assert seen == started
    assert named == ([] if "start_api_server" in started else [b"dashboard"]), "else Ray's agent goes on asking for it"
    assert methods == {helper: getattr(Node, helper) for helper in HELPERS}, "as before for whoever starts Ray next"
