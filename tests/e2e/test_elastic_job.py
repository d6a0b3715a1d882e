"""Replicas are added and removed by HTTP while a job trains, killed while they start, and so is the driver: no prompt is lost."""

from __future__ import annotations

import json
import signal
import stat
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.conftest import Mains, Running, Task
from tests.e2e.test_async_job import ASYNC, RAY_TIMEOUT_S, audit, audited, finished, weights
from tests.support.metrics import rows_of, rows_so_far

RAY = ("trainer.backend=ray", "trainer.ray_init.num_cpus=4", "trainer.ray_init.object_store_memory=100000000")
ELASTIC = (
    "trainer.pools.generation.n_gpus_per_node=2",
    "trainer.placement.rollout=generation",
    "actor_rollout_ref.rollout.min_replicas=1",
)
STALLED = "trainer.faults=[{kind: delay, place: replica.start, rank: 1, step: 1, seconds: 10000}]"
"""The first start of rollout-1 does not come to its end."""
STEPS = 12


class Administrator:
    """A user with the run folder, and a client of HTTP."""

    def __init__(self, run: Path) -> None:
        self.file = run / "admin.json"

    def ask(self, method: str, name: str = "", *, key: str | None = None) -> tuple[int, dict[str, Any]]:
        place = json.loads(self.file.read_text())
        request = urllib.request.Request(f"{place['url']}/admin/replicas{name and '/'}{name}", method=method)
        request.add_header("Authorization", f"Bearer {place['key'] if key is None else key}")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)["error"]

    def states(self) -> dict[str, str]:
        return {replica["name"]: replica["state"] for replica in self.ask("GET")[1]["replicas"]}

    def last(self) -> dict[str, Any]:
        """The newest change."""
        change: dict[str, Any] = self.ask("GET")[1]["changes"][-1]
        return change


def starting(running: Running, name: str) -> Callable[[], Any]:
    """Its process is there."""

    def found() -> Any:
        try:
            return running.writer(f"{name}.log")
        except AssertionError:
            return None

    return found


def test_replicas_come_and_go_by_http_and_are_killed_while_they_start(mains: Mains, task: Task, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = audited(task, tmp_path, *RAY, *ELASTIC, STALLED, steps=STEPS)
    admin = Administrator(run)

    running = mains.start(arguments, hold=1)
    running.until(lambda: len(rows_so_far(run)) >= 1, "a step", RAY_TIMEOUT_S)
    assert stat.S_IMODE(admin.file.stat().st_mode) == 0o600
    assert admin.ask("GET", key="other")[0] == 401
    assert admin.states() == {"rollout-0": "serving"}
    code, error = admin.ask("DELETE", "rollout-0")
    assert code == 409 and "the last replica" in error["message"]
    code, error = admin.ask("DELETE", "rolout-0")
    assert code == 404 and "did you mean 'rollout-0'?" in error["message"]

    code, told = admin.ask("POST")
    assert code == 202 and told["replica"] == "rollout-1"
    code, error = admin.ask("POST")
    assert code == 409 and "2 replicas, of at most 2 (rollout.max_replicas)" in error["message"]
    struck = run / "logs" / "fault-delay-replica.start-rank1-step1.json"
    running.until(struck.exists, "the start that does not end", RAY_TIMEOUT_S)
    running.until(starting(running, "rollout-1"), "its process", RAY_TIMEOUT_S).kill()
    running.until(lambda: admin.last()["state"] == "failed", "its failure", RAY_TIMEOUT_S)
    assert admin.states() == {"rollout-0": "serving"}, "its place is free"

    assert admin.ask("POST")[0] == 202
    running.until(lambda: admin.last()["state"] == "done", "the second one", RAY_TIMEOUT_S)
    assert admin.states() == {"rollout-0": "serving", "rollout-1": "serving"}
    running.hold(after=4)
    running.until(lambda: len(rows_so_far(run)) > 3, "steps with two", RAY_TIMEOUT_S)
    assert admin.ask("DELETE", "rollout-0")[0] == 202
    running.until(lambda: admin.states() == {"rollout-1": "serving"}, "the removal", RAY_TIMEOUT_S)
    running.hold(after=6)
    running.until(lambda: len(rows_so_far(run)) > 5, "steps with the new one alone", RAY_TIMEOUT_S)

    assert admin.ask("POST")[1]["replica"] == "rollout-0"  # and the driver dies in the middle of it
    running.until(starting(running, "rollout-0"), "the process", RAY_TIMEOUT_S)
    running.send(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL and running.leftovers() == []
    rows = rows_so_far(run)
    assert [rows[-1][f"rollout/replicas{kind}"] for kind in ("", "_added", "_removed", "_failed")] == [1, 1, 1, 1]
    assert "adding replica rollout-1: asked for over HTTP" in running.output(), "each change has its line in the log"

    finished(mains.start(arguments).wait(RAY_TIMEOUT_S))
    audit(tmp_path, len(task.rows), STEPS)
    assert rows_of(run)[-1]["rollout/replicas"] >= 1 and not admin.file.exists()


def test_without_staleness_replicas_that_come_and_go_change_no_bit(mains: Mains, task: Task, tmp_path: Path) -> None:
    """By the recipe's driver, which adds one before the second step and removes it before the fourth; the control is a run of
    whole batches in this process."""
    finished(mains.run(task.arguments(tmp_path / "sync")))
    settings = task.arguments(tmp_path / "run", ASYNC, *RAY, *ELASTIC, "trainer.max_staleness=0")
    finished(mains.start(["--add", "2", "--remove", "4", *settings], module="recipes.async_grpo.replicas").wait(RAY_TIMEOUT_S))
    rows = rows_of(tmp_path / "run")
    assert [row["rollout/replicas_added"] for row in rows] == [0, 1, 1, 1] and rows[2]["rollout/replicas"] == 2
    assert weights(tmp_path / "run", 4) == weights(tmp_path / "sync", 4)
