"""Faults planned by configuration, in the driver's process and in Ray's: each strikes once, is told, and the run goes on.  The
program scripts/checks/faults.py runs every kind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.conftest import Mains, Result, Task
from tests.e2e.test_async_job import weights
from tests.support.metrics import rows_of

STEPS = 4
OFTEN = ("trainer.save_freq=1",)
RAY = (
    "trainer.backend=ray",
    "trainer.n_gpus_per_node=2",
    "trainer.ray_init.num_cpus=2",
    "trainer.ray_init.object_store_memory=100000000",
)


def planned(task: Task, folder: Path, *rows: str, more: tuple[str, ...] = ()) -> list[str]:
    faults = (f"trainer.faults=[{','.join('{' + row + '}' for row in rows)}]",) if rows else ()
    return task.arguments(folder, *OFTEN, *more, *faults)


def finished(result: Result) -> Result:
    assert result.code == 0, result.output
    return result


@pytest.fixture(scope="module")
def undisturbed(mains: Mains, task: Task, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    finished(mains.run(planned(task, folder)))
    return weights(folder, STEPS)


KILL_LATER = "kind: kill, place: driver.step, step: 4"


@pytest.mark.parametrize(
    ("rows", "code", "said", "said_again"),
    [
        (
            ["kind: raise, place: actor.update_actor, step: 3"],
            1,
            "update_actor raised InjectedFaultError",
            "continuing at step 3",
        ),
        (["kind: full, place: checkpoint.write, step: 2"], 1, "No space left on device", "continuing at step 2"),
        (["kind: full, place: metrics.write, step: 2"], 1, "cannot write the metrics of step 2", "continuing at step 3"),
        (["kind: nonfinite, place: engine.log_probs, step: 2"], 1, "log-prob that is not finite", "continuing at step 2"),
        (["kind: flip, place: checkpoint.committed, step: 3", KILL_LATER], -signal.SIGKILL, "", "another checksum"),
    ],
)
def test_a_fault_ends_the_run_once_and_the_same_command_goes_on_to_the_same_weights(
    mains: Mains,
    task: Task,
    tmp_path: Path,
    undisturbed: dict[str, bytes],
    rows: list[str],
    code: int,
    said: str,
    said_again: str,
) -> None:
    arguments = planned(task, tmp_path, *rows)
    first = mains.run(arguments)
    assert first.code == code and said in first.output, first.output
    assert "trainer.faults: this run is made to fail: " in first.output
    assert "Traceback" not in first.output.split("--- remote traceback ---")[0], first.output
    again = finished(mains.run(arguments))
    assert said_again in again.output, again.output
    assert weights(tmp_path, STEPS) == undisturbed


def test_a_failing_reward_is_counted_and_a_fault_that_never_struck_is_told(mains: Mains, task: Task, tmp_path: Path) -> None:
    rows = ("kind: segfault, place: reward.call, step: 2", "kind: kill, place: critic.update_critic, step: 2")
    result = finished(mains.run(planned(task, tmp_path, *rows)))
    assert [row["reward/num_failed"] for row in rows_of(tmp_path)] == [0, 1, 0, 0]
    assert "not struck, because no such place was passed: kill at critic.update_critic" in result.output


def test_a_killed_rank_is_named_and_the_run_goes_on(mains: Mains, task: Task, tmp_path: Path) -> None:
    arguments = planned(task, tmp_path, "kind: kill, place: actor.update_actor, rank: 1, step: 3", more=RAY)
    running = mains.start(arguments)
    ended = running.wait()
    assert ended.code == 1 and "[actor_rollout_ref rank 1" in ended.output and "died" in ended.output, ended.output
    assert running.leftovers() == []
    again = finished(mains.run(arguments))
    assert "continuing at step 3" in again.output
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4]
