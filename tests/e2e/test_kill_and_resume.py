"""A driver killed at any moment and started again ends as if nothing had happened."""

from __future__ import annotations

import json
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MAIN, Mains, Running, Task, write_rows
from tests.support.metrics import rows_of, rows_so_far

SFT = "rlhub.trainer.main_sft"
STEPS = 4
EVERYTHING_THAT_HAS_STATE = (
    "data.val_files={task}/val.parquet",
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=50",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.shuffle=True",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
    "critic.optim.lr=1e-3",
    "trainer.test_freq=2",
    "trainer.log_val_generations=2",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=2",
)
VARYING = ("timing_", "perf/", "memory/")


def stateful(task: Task, run_folder: Path, *more: str) -> list[str]:
    """A run with a critic, an adaptive coefficient, schedules, shuffling and an epoch's end: all that a resume must restore."""
    return task.arguments(run_folder, *(text.format(task=task.folder) for text in EVERYTHING_THAT_HAS_STATE), *more)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What must not depend on how often a run was killed.  metrics: rows less timings; files: weights, optimizer states and
    sample generations by relative path; state: the trainer's own."""

    metrics: list[dict[str, Any]]
    files: dict[str, bytes]
    state: dict[str, Any]


def without_timing(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(VARYING)}


def steps_logged(folder: Path) -> list[int]:
    return [row["step"] for row in rows_so_far(folder)]


def outcome(folder: Path) -> Outcome:
    last = folder / f"global_step_{STEPS}"
    state = json.loads((last / "trainer.json").read_text())
    files = [*last.rglob("*.safetensors"), *last.rglob("scalars.json"), *(folder / "generations").iterdir()]
    return Outcome(
        metrics=[without_timing(row) for row in rows_of(folder)],
        files={str(path.relative_to(folder)): path.read_bytes() for path in files},
        state={**state, "metrics": without_timing(state["metrics"])},
    )


def assert_same(got: Outcome, expected: Outcome) -> None:
    assert [row["step"] for row in got.metrics] == list(range(STEPS + 1))
    assert got.metrics == expected.metrics
    assert got.state == expected.state
    assert got.files.keys() == expected.files.keys()
    assert [name for name in got.files if got.files[name] != expected.files[name]] == []


@dataclass(slots=True, kw_only=True)
class Reference:
    """An uninterrupted run.  operations: its changes of files, in order."""

    outcome: Outcome
    operations: list[str]
    seconds: float


@pytest.fixture(scope="session")
def reference(mains: Mains, task: Task, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("uninterrupted")
    running = mains.start(stateful(task, folder), watch=folder)
    result = running.wait()
    assert result.code == 0, result.output
    return Reference(outcome=outcome(folder), operations=running.operations(), seconds=result.seconds)


def newest_checkpoint(folder: Path) -> int:
    """The last committed step, 0 without one."""
    return max((int(path.name.rpartition("_")[2]) for path in folder.glob("global_step_*")), default=0)


def check_start(running: Running, folder: Path, saved: int, logged: list[int]) -> None:
    """It resumed behind the newest checkpoint, said so, and repeats no step that was logged (so at most the one under way).
    Where it was killed in between, only what it got to is asked for."""
    if saved:
        assert set(range(1, saved)) <= set(logged) <= set(range(saved + 1)), (saved, logged)
        if "rlhub/run" in running.output():
            assert f"rlhub/run, resumed after step {saved}:" in running.output(), running.output()
        if running.poll() == 0 or max(steps_logged(folder), default=0) > saved:
            told = f"continuing at step {saved + 1} of {STEPS}" if saved < STEPS else "this run already finished"
            assert told in running.output() and f"global_step_{saved}" in running.output(), running.output()
    else:
        assert logged in ([], [0])
        assert "resumed after" not in running.output() and "continuing at" not in running.output()
    assert running.leftovers() == []


def run_killed(mains: Mains, arguments: list[str], folder: Path, die: dict[str, Any], module: str = MAIN) -> bool:
    """One start of the command that kills itself as told; False when it ended before that moment came."""
    saved, logged = newest_checkpoint(folder), steps_logged(folder)
    running = mains.start(arguments, module=module, watch=folder, die=die)
    result = running.wait()
    assert result.code in (0, -signal.SIGKILL), result.output
    check_start(running, folder, saved, logged)
    return result.code != 0


CHOSEN = [
    ("write metrics.jsonl", 1),  # half a line of step 0
    ("open .saving_global_step_1/actor/scalars.json", 1),  # between two files of the first save
    ("write .saving_global_step_1/actor/huggingface/part-00000.safetensors", 9),  # within one
    ("rename .saving_global_step_1", 1),  # all there, not committed
    ("open latest_checkpointed_iteration.txt.part", 1),  # committed, pointer and line missing
    ("write metrics.jsonl", 1),  # half of the line that resuming restores
    ("open metrics.jsonl", 2),  # the same between commit and line of the next step
    ("open .saving_global_step_3/critic/scalars.json", 1),  # between the files of two roles
    ("rename global_step_1", 1),  # a checkpoint more than is kept is about to be deleted
    ("rmdir .deleting_global_step_2/actor", 1),  # half of one deleted
    ("open metrics.jsonl", 1),  # the last step's line missing
]


def test_killed_at_chosen_file_operations(mains: Mains, task: Task, reference: Reference, tmp_path: Path) -> None:
    arguments = stateful(task, tmp_path)
    for operation, nth in CHOSEN:
        assert operation in reference.operations
        assert run_killed(mains, arguments, tmp_path, {"operation": operation, "nth": nth}), (operation, steps_logged(tmp_path))
    assert newest_checkpoint(tmp_path) == STEPS
    assert not run_killed(mains, arguments, tmp_path, {})
    assert_same(outcome(tmp_path), reference.outcome)


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_file_operations(mains: Mains, task: Task, reference: Reference, tmp_path: Path, seed: int) -> None:
    arguments, chance = stateful(task, tmp_path), random.Random(seed)
    for _ in range(5):
        run_killed(mains, arguments, tmp_path, {"at": chance.randint(1, len(reference.operations) // 2)})
    assert not run_killed(mains, arguments, tmp_path, {})
    assert_same(outcome(tmp_path), reference.outcome)


def test_killed_from_outside_at_random_moments(mains: Mains, task: Task, reference: Reference, tmp_path: Path) -> None:
    arguments = stateful(task, tmp_path)
    for _ in range(4):
        saved, logged = newest_checkpoint(tmp_path), steps_logged(tmp_path)
        running = mains.start(arguments)
        time.sleep(random.uniform(0.2, 0.9) * reference.seconds)
        if running.poll() is None:
            running.send(signal.SIGKILL)
        assert running.wait().code in (0, -signal.SIGKILL), running.output()
        check_start(running, tmp_path, saved, logged)
    assert mains.run(arguments).code == 0
    assert_same(outcome(tmp_path), reference.outcome)


def test_a_run_with_another_seed_differs(mains: Mains, task: Task, reference: Reference, tmp_path: Path) -> None:
    """The control of the comparisons here: they see a difference where there is one."""
    assert mains.run(stateful(task, tmp_path, "trainer.seed=2")).code == 0
    other = outcome(tmp_path)
    assert [row["step"] for row in other.metrics] == list(range(STEPS + 1))
    assert all(mine != theirs for mine, theirs in zip(other.metrics[1:], reference.outcome.metrics[1:], strict=True))
    weights = f"global_step_{STEPS}/actor/huggingface/model.safetensors"
    assert other.files[weights] != reference.outcome.files[weights]


def test_supervised_fine_tuning_killed(mains: Mains, task: Task, tmp_path: Path) -> None:
    rows = [{"prompt": row["prompt"], "response": row["prompt"]} for row in task.rows]
    settings = [
        f"data.train_files={write_rows(tmp_path / 'train.parquet', rows)}",
        f"data.val_files={write_rows(tmp_path / 'val.parquet', rows[:4])}",
        "data.train_batch_size=8",
        "data.max_length=16",
        f"model.path={task.folder / 'model'}",
        "optim.lr=1e-3",
        "optim.lr_scheduler_type=cosine",
        "trainer.backend=local",
        "trainer.device=cpu",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=2",
        "trainer.save_freq=1",
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert mains.run([*settings, f"trainer.default_local_dir={whole}"], module=SFT).code == 0
    arguments = [*settings, f"trainer.default_local_dir={killed}"]
    for operation, nth in [("rename .saving_global_step_2", 1), ("open metrics.jsonl", 3)]:
        assert run_killed(mains, arguments, killed, {"operation": operation, "nth": nth}, SFT)
    assert not run_killed(mains, arguments, killed, {}, SFT)
    assert_same(outcome(killed), outcome(whole))


def test_terminated_then_finished_then_started_anew(mains: Mains, task: Task, reference: Reference, tmp_path: Path) -> None:
    arguments = stateful(task, tmp_path, "trainer.save_freq=3")
    running = mains.start(arguments, hold=1)
    running.until(lambda: 1 in steps_logged(tmp_path), "step 1 was logged")
    running.send(signal.SIGSTOP)
    second = mains.run(arguments)
    assert second.code not in (0, -signal.SIGKILL)
    assert f"another run is using {tmp_path} (pid {running.pid}" in second.output
    running.send(signal.SIGTERM)
    running.send(signal.SIGCONT)
    running.let_go()
    ended = running.wait()
    assert ended.code == 128 + signal.SIGTERM, ended.output
    assert "SIGTERM: stopping" in ended.output
    stopped_at = steps_logged(tmp_path)[-1]
    assert stopped_at == 2
    assert newest_checkpoint(tmp_path) == stopped_at  # saved although only step 3's was due
    assert running.leftovers() == []

    rerun = mains.run(arguments)
    assert rerun.code == 0
    assert f"continuing at step {stopped_at + 1} of {STEPS}" in rerun.output
    assert_same(outcome(tmp_path), reference.outcome)

    before = contents(tmp_path)
    finished = mains.run(arguments)
    assert finished.code == 0
    assert "this run already finished" in finished.output
    assert "trainer.resume_mode=disable" in finished.output  # how to start anew
    assert contents(tmp_path) == before

    anew = mains.run([*arguments, "trainer.resume_mode=disable"])
    assert anew.code == 0
    assert f"moved to {tmp_path / 'earlier-1'}" in anew.output
    assert_same(outcome(tmp_path), reference.outcome)
    assert contents(tmp_path / "earlier-1") == before


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a run folder but the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "run.lock"
    }


def test_killed_through_ray(mains: Mains, task: Task, reference: Reference, tmp_path: Path) -> None:
    """The same command from a shell, with its worker in a Ray process: nothing of the killed run stays alive, and the end is
    that of the run in process."""
    arguments = stateful(task, tmp_path, "trainer.backend=ray", "trainer.ray_init.object_store_memory=200000000")
    running = mains.start_fresh(arguments, hold=2)
    running.until(lambda: 1 in steps_logged(tmp_path), "step 1 was logged")
    running.send(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL
    assert running.leftovers() == []
    saved, logged = newest_checkpoint(tmp_path), steps_logged(tmp_path)
    again = mains.start_fresh(arguments)
    assert again.wait().code == 0, again.output()
    check_start(again, tmp_path, saved, logged)
    assert_same(outcome(tmp_path), reference.outcome)
