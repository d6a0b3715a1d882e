"""Clusters that do not answer: wrong addresses, and a head that ends or stands still under a run.  Sockets in place of Ray."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhub.errors import ClusterLostError, ConfigError, ResourceError
from rlhub.single_controller.ray import cluster, orphans, watch
from rlhub.single_controller.ray.nodes import FRAME_HEADER_BYTES, SETTINGS, read_address, silence
from tests.support.processes import alive, all_end

ANSWER = bytes((0, 0, 0, SETTINGS)) + bytes(FRAME_HEADER_BYTES - 4)


@contextmanager
def server(answer: bytes | None) -> Iterator[socket.socket]:
    """Answers every connection; None: listens, and is as a stopped process is."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer or b"")

        if answer is not None:
            threading.Thread(target=serve, daemon=True).start()
        yield listening
        listening.shutdown(socket.SHUT_RDWR)


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


@pytest.fixture(autouse=True)
def nothing_watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.02)
    yield
    watch.unwatch()
    watch._current = None


def test_who_answers_and_who_does_not() -> None:
    with server(ANSWER) as rays:
        port = port_of(rays)
        assert silence("127.0.0.1", port, 10.0) is None
    assert isinstance(silence("127.0.0.1", port, 10.0), ConnectionRefusedError)
    with server(b"HTTP/1.1 400 Bad Request\r\n\r\n") as other:
        assert "not Ray's" in str(silence("127.0.0.1", port_of(other), 10.0))
    with server(None) as stopped:
        begin = time.monotonic()
        assert "no answer within 0.3 s" in str(silence("127.0.0.1", port_of(stopped), 0.3))
        assert time.monotonic() - begin < 20.0, "it would be silent for ever"
    assert "is not known" in str(silence("no-such-host.invalid", 6379, 30.0))


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [
        (None, None, None),
        ("local", "10.0.0.1:6379", None),
        (None, "local", None),
        ("10.0.0.2:6379", "10.0.0.1:6379", ("10.0.0.2", 6379, "trainer.ray_init.address")),
        (None, "10.0.0.1:6379", ("10.0.0.1", 6379, "RAY_ADDRESS")),
        ("auto", "10.0.0.1:6379", ("10.0.0.1", 6379, "RAY_ADDRESS")),
        ("ray://head:10009", None, ("head", 10009, "trainer.ray_init.address")),
        ("ray://head", None, ("head", 10001, "trainer.ray_init.address")),
        ("[::1]:6379", None, ("::1", 6379, "trainer.ray_init.address")),
    ],
)
def test_where_an_address_is_from(
    monkeypatch: pytest.MonkeyPatch, given: str | None, variable: str | None, expected: tuple[str, int, str] | None
) -> None:
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    found = read_address(given)
    assert (found and (found.host, found.port, found.source)) == expected


@pytest.mark.parametrize("given", ["head", "head:port", "head:99999", "ray://"])
def test_what_is_no_address_is_said(given: str) -> None:
    with pytest.raises(ConfigError, match="trainer.ray_init.address=.*is no address of a Ray cluster; expected host:port"):
        read_address(given)


def join(address: str | None, deadline_s: float = 60.0) -> str:
    """The refusal, and that it comes in time."""
    begin = time.monotonic()
    with pytest.raises(ResourceError) as refused:
        cluster.connect({} if address is None else {"address": address}, device="cpu", num_ranks=1, deadline_s=deadline_s)
    assert time.monotonic() - begin < min(deadline_s, 30.0) + 25.0, "Ray tries for a minute and more"
    return str(refused.value)


def test_a_wrong_address_is_refused_in_time_with_its_source_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    told = join("127.0.0.1:1")
    assert "cannot join the Ray cluster at 127.0.0.1:1 (trainer.ray_init.address): nothing listens there" in told
    assert "start that cluster, correct trainer.ray_init.address, or leave it out" in told
    assert "no-such-host.invalid is not known" in join("no-such-host.invalid:6379")
    assert "ray://127.0.0.1:1" in join("ray://127.0.0.1:1")
    with server(None) as stopped:
        assert "not done after 0.5 s (trainer.deadline_s.resources)" in join(f"127.0.0.1:{port_of(stopped)}", 0.5)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    for given in (None, "auto"):
        assert "127.0.0.1:1 (RAY_ADDRESS): nothing listens there" in (told := join(given)) and "unset it" in told


def test_ray_that_hangs_all_the_same_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a server answers that is not the head."""
    go_on = threading.Event()
    monkeypatch.setattr(cluster.ray, "init", lambda **_: go_on.wait(60.0))
    with server(ANSWER) as other:
        assert "not done after 0.5 s (trainer.deadline_s.resources)" in join(f"127.0.0.1:{port_of(other)}", 0.5)
    go_on.set()


class Told:
    def __init__(self) -> None:
        self.errors: list[ClusterLostError] = []

    def cluster_lost(self, error: ClusterLostError) -> None:
        self.errors.append(error)


def lost_within(seconds: float) -> ClusterLostError:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            watch.check_cluster()
        except ClusterLostError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("not told")


def test_a_head_of_ones_own_that_ends_is_told_at_once() -> None:
    told = Told()
    watch.listen(told)
    with server(ANSWER) as head:
        watch.watch_cluster("127.0.0.1", port_of(head), deadline_s=60.0, owned=True)
        time.sleep(0.2)
        watch.check_cluster()
        port = port_of(head)
    error = lost_within(50.0)
    assert f"127.0.0.1:{port} has ended" in str(error) and "newest checkpoint" in str(error)
    ends = time.monotonic() + 60.0  # the error is there a moment before the watch's thread reports it
    while not told.errors and time.monotonic() < ends:
        time.sleep(0.01)
    assert told.errors == [error]
    watch.listen(late := Told())
    assert late.errors == [error]


def test_a_head_that_is_joined_may_be_silent_for_its_deadline() -> None:
    with server(ANSWER) as head:
        port = port_of(head)
        watch.watch_cluster("127.0.0.1", port, deadline_s=3.0, owned=False)
        time.sleep(0.2)
        begin = time.monotonic()  # an attempt that the end meets was begun a second before at most
    error = lost_within(60.0)
    assert time.monotonic() - begin > 1.5
    assert "has not answered for 3 s (trainer.deadline_s.cluster)" in str(error)


def test_a_head_that_stands_still_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with server(None) as head:
        watch.watch_cluster("127.0.0.1", port_of(head), deadline_s=0.5, owned=True)
        assert "has not answered for 0.5 s" in str(lost_within(60.0))


def test_what_is_asked_of_the_head_ends_with_it() -> None:
    """As giving back places does, which Ray tries for a minute."""
    go_on, asked = threading.Event(), list[int]()
    with server(ANSWER) as head:
        watch.watch_cluster("127.0.0.1", port_of(head), deadline_s=60.0, owned=True)
        assert watch.head_answers()
        watch.while_it_lives(lambda: asked.append(1))
        assert asked == [1]
    assert not watch.head_answers()
    begin = time.monotonic()
    watch.while_it_lives(lambda: go_on.wait(600.0))
    assert time.monotonic() - begin < 45.0, "silence alone would be told after 50 s"
    go_on.set()


def test_a_driver_that_stood_still_itself_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it hears nothing, for longer than the deadline; the next time it does."""
    asked: list[float] = []

    def silent_once(host: str, port: int, timeout_s: float) -> OSError | None:
        asked.append(time.monotonic())
        if len(asked) > 1:
            return None
        time.sleep(0.6)
        return TimeoutError("no answer")

    monkeypatch.setattr(watch, "silence", silent_once)
    watch.watch_cluster("127.0.0.1", 1, deadline_s=0.3, owned=True)
    while len(asked) < 4:
        time.sleep(0.01)
    watch.check_cluster()


STARTER = """
import os, subprocess, sys, time
sleeper = [sys.executable, "-S", "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"]
log = open(os.path.join(sys.argv[2], "log"), "w")
apart = {"stdout": subprocess.DEVNULL, "start_new_session": True}
started = [
    subprocess.Popen(sleeper, env={**os.environ, "MARK": "mine"}, **apart),
    subprocess.Popen(sleeper, **{**apart, "stdout": log}),
    subprocess.Popen([sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), "MARK=mine", sys.argv[2]], **apart),
    subprocess.Popen(sleeper, env={**os.environ, "MARK": "other"}, **apart),
    subprocess.Popen(sleeper, stdin=open(log.name), **apart),
]
sys.stdout.write(" ".join(str(process.pid) for process in started) + "\\n")
sys.stdout.flush()
time.sleep(600)
"""


def test_what_a_killed_program_left_is_ended(tmp_path: Path) -> None:
    """What has its mark or writes its log, whoever its parent now is, also what ignores signals; others stay, readers too."""
    program = subprocess.Popen(
        [sys.executable, "-c", STARTER, orphans.__file__, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    pids = list(map(int, program.stdout.readline().split()))
    try:
        time.sleep(1.0)
        assert all(map(alive, pids)), "its starter lives"
        program.kill()
        program.communicate()
        assert all_end(pids[:3])
        assert all(map(alive, pids[3:]))
    finally:
        program.kill()
        for pid in pids[3:]:
            os.kill(pid, signal.SIGKILL)
