"""Training on episodes that run beside it, as a job: what it must not change, and that no prompt is lost or trained twice."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from rlhub.protocol import DataProto
from tests.e2e.conftest import Mains, Result, Running, Task, write_rows
from tests.support.metrics import rows_of, rows_so_far

ASYNC = "actor_rollout_ref.rollout.mode=async"
RAY_TIMEOUT_S = 400.0
CORRECTED = "algorithm.rollout_correction.rollout_is=token"
REWARD = """
import json

def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open({audit!r}, "a") as stream:
        stream.write(json.dumps([ground_truth, solution_str]) + "\\n")
    words = solution_str.split()
    return sum(word[-1:] in "02468" for word in words) / max(len(words), 1)
"""


def finished(result: Result) -> Result:
    assert result.code == 0, result.output
    return result


def weights(run_folder: Path, step: int) -> dict[str, bytes]:
    tensors = load_file(run_folder / f"global_step_{step}" / "actor" / "huggingface" / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_without_staleness_the_weights_are_those_of_the_synchronous_trainer(mains: Mains, task: Task, tmp_path: Path) -> None:
    """Bit for bit, with a critic, two optimizer steps a batch and a KL to the reference; another seed differs.  The replicas
    sleep while the actor trains beside them."""
    more = (
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.use_kl_loss=True",
    )
    runs = {"sync": (), "async": (ASYNC, "trainer.max_staleness=0"), "other": (ASYNC, "trainer.seed=2")}
    for name, settings in runs.items():
        finished(mains.run(task.arguments(tmp_path / name, *more, *settings)))
    found = {name: weights(tmp_path / name, 4) for name in runs}
    assert found["async"] == found["sync"]
    assert found["other"] != found["sync"]
    shown = [[row[key] for key in ("reward/mean", "actor/loss")] for row in rows_of(tmp_path / "async")]
    assert shown == [[row[key] for key in ("reward/mean", "actor/loss")] for row in rows_of(tmp_path / "sync")]
    assert all("timing_s/rollout_sleep" in row for row in rows_of(tmp_path / "async"))


def test_a_recorded_run_is_replayed_without_engines(mains: Mains, task: Task, tmp_path: Path) -> None:
    """The first run, whose step is a graph, is two versions stale, with validation beside it; its batches alone give the same
    weights again by the plain step."""
    run, again, changed = (tmp_path / name for name in ("run", "again", "changed"))
    validation = (f"data.val_files={task.folder / 'val.parquet'}", "trainer.test_freq=1")
    stale = (ASYNC, "trainer.max_staleness=2", "trainer.pacing=fixed", "trainer.record_batches=True", *validation)
    finished(mains.run(task.arguments(run, CORRECTED, *stale, "trainer.pipeline=ppo")))
    check_metrics(rows_of(run))
    assert not any("timing_s/rollout_sleep" in row for row in rows_of(run))
    replay = f"trainer.replay_from={run / 'batches'}"
    finished(mains.run(task.arguments(again, CORRECTED, replay)))
    assert weights(again, 4) == weights(run, 4)
    path = run / "batches" / "step-000002.safetensors"
    batch = DataProto.load_from_disk(path)
    batch.batch["scores"] *= -1
    batch.save_to_disk(path)
    finished(mains.run(task.arguments(changed, CORRECTED, replay)))
    assert weights(changed, 4) != weights(run, 4)


def check_metrics(rows: Sequence[dict[str, Any]]) -> None:
    """Validation stands with its step; staleness grows to the bound, and the mismatch is told apart by it."""
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["val/num_prompts"] == 4 for row in rows)
    staleness = [row["staleness/max"] for row in rows[1:]]
    assert max(staleness) == 2 and all(found <= bound for found, bound in zip(staleness, [0, 1, 2, 2], strict=True))
    assert abs(rows[1]["mismatch/kl/staleness_0"]) < 1e-6 < max(abs(row.get("mismatch/kl/staleness_2", 0)) for row in rows)
    for name in ("rollout/idle_share", "trainer/idle_share", "rollout/wasted_token_share"):
        assert 0 <= rows[4][name] < 1
    assert rows[4]["rollout/pause_s"] > 0
    assert all(row[f"perf/driver_{name}"] > 0 for row in rows[1:] for name in ("bytes_out", "bytes_in", "calls"))
    assert 0 <= rows[4]["rollout/in_flight_share"] <= 1, "none when all that may be in work is done"


# Every prompt is trained, or explicitly left out, exactly once.

STEPS = 6
BATCH = 8


def audited(task: Task, folder: Path, *more: str, steps: int = STEPS) -> list[str]:
    """A run whose reward function writes down what it scores, with a prompt's number as its ground truth."""
    reward = folder / "reward.py"
    reward.write_text(REWARD.format(audit=str(folder / "scored.jsonl")))
    rows = [{**row, "reward_model": {"style": "rule", "ground_truth": str(number)}} for number, row in enumerate(task.rows)]
    write_rows(folder / "train.parquet", rows)
    return task.arguments(
        folder / "run",
        f"data.train_files={folder / 'train.parquet'}",
        "data.shuffle=False",
        f"custom_reward_function.path={reward}",
        ASYNC,
        CORRECTED,
        "trainer.max_staleness=2",
        "trainer.save_freq=1",
        "trainer.record_batches=True",
        "trainer.max_actor_ckpt_to_keep=2",
        f"trainer.total_training_steps={steps}",
        *more,
    )


def audit(folder: Path, num_rows: int, steps: int = STEPS) -> None:
    """From the recorded batches, the log of prompts and the reward function's own file."""
    run = folder / "run"
    batches = [DataProto.load_from_disk(run / "batches" / f"step-{step:06d}.safetensors") for step in range(1, steps + 1)]
    trained = [ordinal for batch in batches for ordinal in batch.batch["ordinal"][::2].tolist()]
    ended = [json.loads(line) for line in (run / "prompts.jsonl").read_text().splitlines()]
    ends = Counter(row["ordinal"] for row in ended)
    assert len(trained) == steps * BATCH and len(set(trained)) == len(trained)
    assert max(ends.values()) == 1
    assert sorted(row["ordinal"] for row in ended if row["end"] == "trained") == sorted(trained)
    explicit = {row["ordinal"] for row in ended if row["end"] in ("rejected", "dropped")}
    assert {*range(num_rows)} <= {*trained, *explicit}, "a prompt of the first epoch was passed over"
    scored = {json.loads(line)[0] for line in (folder / "scored.jsonl").read_text().splitlines()}
    assert {str(ordinal % num_rows) for ordinal in trained} <= scored
    assert [row["step"] for row in rows_of(run)] == list(range(1, steps + 1))
    assert max(row["staleness/max"] for row in rows_of(run)) <= 2


def kill_after(running: Running, folder: Path, step: int) -> None:
    running.until(lambda: any(row["step"] >= step for row in rows_so_far(folder / "run")), f"step {step}")
    running.send(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL


def test_no_prompt_is_lost_when_the_driver_is_killed(mains: Mains, task: Task, tmp_path: Path) -> None:
    """Twice, wherever it is then; the resumed run goes on with finished samples that were not trained.  A batch in which a prompt
    stands a second time is noticed."""
    arguments = audited(task, tmp_path)
    for step in (1, 3):
        kill_after(mains.start(arguments, hold=step + 1), tmp_path, step)
    finished(mains.run(arguments))
    audit(tmp_path, len(task.rows))
    path = tmp_path / "run" / "batches" / "step-000003.safetensors"
    batch = DataProto.load_from_disk(path)
    batch.batch["ordinal"][:2] = 0
    batch.save_to_disk(path)
    with pytest.raises(AssertionError):
        audit(tmp_path, len(task.rows))


def test_no_prompt_is_lost_when_a_replica_and_a_training_rank_are_killed(mains: Mains, task: Task, tmp_path: Path) -> None:
    """On Ray.  The replica is replaced and the run goes on; the rank's death ends it, and it is started again."""
    steps = 24
    more = ("trainer.backend=ray", "trainer.ray_init.num_cpus=4", "trainer.ray_init.object_store_memory=100000000")
    arguments = audited(task, tmp_path, *more, steps=steps)
    running = mains.start(arguments, hold=4)
    running.until(lambda: len(rows_so_far(tmp_path / "run")) >= 2, "two steps", RAY_TIMEOUT_S)
    running.writer("rollout-0.log").kill()
    running.hold(after=16)  # samples for so many steps are not there without the replica
    restarted = lambda: any(row.get("rollout/replica_restarts") for row in rows_so_far(tmp_path / "run"))  # noqa: E731
    running.until(restarted, "a replica's return", RAY_TIMEOUT_S)
    running.writer("actor_rollout_ref-rank0.log").kill()
    running.let_go()
    assert running.wait(RAY_TIMEOUT_S).code == 1 and running.leftovers() == []
    assert 2 < len(rows_so_far(tmp_path / "run")) < steps
    finished(mains.start(arguments).wait(RAY_TIMEOUT_S))
    audit(tmp_path, len(task.rows), steps)
