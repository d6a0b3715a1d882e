"""What a job stands on goes away under it: its folder, or the head of its Ray cluster.  It ends in time, by an error that says
which, and its report does too."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import LEFTOVERS_S, Mains, Running, Task, command_of
from tests.support.metrics import rows_so_far

RAY_WAITS = {"RAY_gcs_rpc_server_reconnect_timeout_s": "100000"}
"""Of Ray's processes, for their cluster's head: without end, where by itself Ray ends the driver after a minute.  What still
waits for the head then never comes to its end, so no time is measured here."""


def logged(folder: Path) -> list[int]:
    return [row["step"] for row in rows_so_far(folder)]


@pytest.mark.parametrize("resume_mode", ["auto", "disable"])
def test_a_checkout_is_no_run_folder_and_stays_as_it_is(mains: Mains, task: Task, tmp_path: Path, resume_mode: str) -> None:
    """trainer.default_local_dir=. where the user's work is, refused before anything starts."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "model.py").write_text("x = 1\n")
    refused = mains.run(task.arguments(tmp_path, f"trainer.resume_mode={resume_mode}"))
    assert refused.code == 2 and "is not empty and holds no run (it has .git, model.py)" in refused.output, refused.output
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", "model.py"]


def test_a_run_folder_that_is_moved_ends_the_run(mains: Mains, task: Task, tmp_path: Path) -> None:
    folder, moved = tmp_path / "run", tmp_path / "moved"
    arguments = task.arguments(folder, "trainer.save_freq=1")
    running = mains.start(arguments, hold=1)
    running.until(lambda: 1 in logged(folder), "step 1 was logged")
    folder.rename(moved)
    running.let_go()
    ended = running.wait()
    assert ended.code == 1 and f"{folder} was moved to {moved} while the run used it" in ended.output, ended.output
    assert "Traceback" not in ended.output and not folder.exists() and logged(moved) == [1]
    moved.rename(folder)
    again = mains.run(arguments)
    assert again.code == 0 and "continuing at step 2 of 4" in again.output and logged(folder) == [1, 2, 3, 4], again.output


def test_a_cluster_that_loses_its_head_ends_the_run(mains: Mains, task: Task, tmp_path: Path) -> None:
    """Ray by itself would end the driver, with a line of its own, and the report would stay "running".  Asynchronous, where
    training, the replicas and the main thread wait in ways of their own."""
    settings = ("trainer.backend=ray", "trainer.ray_init.object_store_memory=200000000", "actor_rollout_ref.rollout.mode=async")
    running = mains.start_fresh(task.arguments(tmp_path, *settings), env=RAY_WAITS, hold=1)
    agents = end_head(running, tmp_path)
    running.until(lambda: "the head of the Ray cluster at 127.0.0.1:" in running.output(), "the loss was told")
    running.let_go()
    ended = running.wait()
    assert ended.code == 1 and "error: " in ended.output and "Traceback" not in ended.output, ended.output
    report = (tmp_path / "report.html").read_text()
    assert ">failed<" in report and "the head of the Ray cluster" in report
    assert running.leftovers() == [] and not psutil.wait_procs(agents, timeout=LEFTOVERS_S)[1]


def test_a_head_that_ends_with_the_last_steps_takes_nothing_from_the_run(mains: Mains, task: Task, tmp_path: Path) -> None:
    """Nothing is asked of it any more: neither places given back nor the cluster ended through it."""
    settings = ("trainer.backend=ray", "trainer.ray_init.object_store_memory=200000000", "trainer.total_training_steps=2")
    running = mains.start_fresh(task.arguments(tmp_path, *settings), env=RAY_WAITS, hold=1)
    agents = end_head(running, tmp_path)
    running.let_go()
    ended = running.wait()
    assert ended.code in (0, 1) and logged(tmp_path) in ([1], [1, 2]), ended.output  # 1 where the loss is seen before
    assert (">finished<" if ended.code == 0 else ">failed<") in (tmp_path / "report.html").read_text()
    assert running.leftovers() == [] and not psutil.wait_procs(agents, timeout=LEFTOVERS_S)[1]


def end_head(running: Running, folder: Path) -> list[psutil.Process]:
    """Kill it after the first step; returns Ray's agents.  These stand still, so that they notice nothing and do not leave by
    themselves; they have no mark, because their titles cover their environment."""
    running.until(lambda: 1 in logged(folder), "step 1 was logged")
    by_name = {name_of(process): process for process in running.processes()}

    def titled() -> list[psutil.Process]:
        found = by_name["raylet"].children()
        return [child for child in found if command_of(child).startswith("ray::") and "Agent" in name_of(child)]

    running.until(lambda: len(titled()) == 2, "both agents had their titles")
    agents = titled()
    for agent in agents:
        agent.suspend()
    by_name["gcs_server"].send_signal(signal.SIGKILL)
    return agents


def name_of(process: psutil.Process) -> str:
    """Empty when it has ended since."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name()
    return ""
