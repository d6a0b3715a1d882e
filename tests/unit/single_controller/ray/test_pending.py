"""A rank that is seen to be dead is named, however late Ray says so: until then its peers' failures are all that is known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, RayError

from rlhub.errors import WorkerDiedError, WorkerError
from rlhub.single_controller import calls
from rlhub.single_controller.calls import Deadline, WorkerInfo
from rlhub.single_controller.ray import pending
from rlhub.single_controller.ray.pending import Gather

BROKEN, DEAD = "broken", "dead"
DEAD_AFTER_S = 0.2


class Ray:
    """Rank 0's failure is there at once, the word of rank 1's death later.  Time passes while somebody waits for that."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, references: Sequence[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        if BROKEN not in references:
            self.now += min(timeout, 0.02)
        told = self.now > DEAD_AFTER_S
        ready = [reference for reference in references if reference == BROKEN or told]
        return ready, [reference for reference in references if reference not in ready]

    def get(self, reference: str) -> None:
        raise ActorDiedError() if reference == DEAD else RayError("the connection broke")


@pytest.fixture
def ended() -> Iterator[int]:
    """The number of a process that has died, and whose parent does not know yet."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def gather(log: Path, pid: int, monkeypatch: pytest.MonkeyPatch, here: str = "here") -> Gather:
    log.touch()
    monkeypatch.setattr(pending, "own_address", lambda: here)
    monkeypatch.setattr(pending, "GRACE_S", 0.0)
    ray = Ray()
    for module, name in ((pending, "ray"), (pending, "time"), (calls, "time")):
        monkeypatch.setattr(module, name, ray)
    workers = {rank: WorkerInfo(rank=rank, node="here", pid=pid if rank else os.getpid(), log=str(log)) for rank in range(2)}
    return Gather("actor", "update", {0: BROKEN, 1: DEAD}, workers, Deadline(seconds=float("inf")), lambda: None)


def test_the_dead_rank_is_named(tmp_path: Path, ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = gather(tmp_path / "log", ended, monkeypatch)
    assert waiting.has_lost()
    with pytest.raises(WorkerDiedError, match="rank 1 on here"):
        waiting.wait()


def test_of_a_rank_on_another_machine_only_ray_knows(tmp_path: Path, ended: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is there, in a folder that all share; its process is not, and may be well."""
    waiting = gather(tmp_path / "log", ended, monkeypatch, here="elsewhere")
    assert not waiting.has_lost()
    with pytest.raises(WorkerError, match="the connection broke"):
        waiting.wait()


def test_for_a_rank_that_lives_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: what is known after the grace is raised."""
    waiting = gather(tmp_path / "log", os.getpid(), monkeypatch)
    assert not waiting.has_lost()
    with pytest.raises(WorkerError, match="the connection broke"):
        waiting.wait()
