"""Bad settings, data, rewards, machines and memory: each ends a real run with a clear error, or the run says how it went on."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, TIMEOUT_S, Mains, Running, Task, prompt_rows, write_rows
from tests.support.hanging import SAYS_SO
from tests.support.metrics import rows_of, rows_so_far

EXIT_USAGE = 2
MISSPELT = "actor_rollout_ref.rollout.temprature=1.0"


@pytest.fixture
def bad_files(tmp_path: Path) -> dict[str, Path]:
    """One bad data file of each kind."""
    rows = prompt_rows(24)
    renamed = [{"prompts" if key == "prompt" else key: value for key, value in row.items()} for row in rows]
    nameless = write_rows(tmp_path / "nameless.parquet", renamed)
    empty, no_rows = tmp_path / "empty.jsonl", tmp_path / "no_rows.jsonl"
    empty.write_text("")
    no_rows.write_text("\n\n")
    long = write_rows(tmp_path / "long.parquet", [*rows, *prompt_rows(1, words=20)])
    return {"nameless": nameless, "empty": empty, "no_rows": no_rows, "long": long}


CHECKED_BEFORE_START = {
    "misspelt key": ([MISSPELT], ["actor_rollout_ref.rollout.temprature", "did you mean actor_rollout_ref.rollout.temperature?"]),
    "missing column": (["data.train_files={nameless}"], ["{nameless} has no column 'prompt'", "did you mean 'prompts'"]),
    "empty file": (["data.train_files={empty}"], ["{empty} is empty"]),
    "file without rows": (["data.train_files={no_rows}"], ["{no_rows} has no rows"]),
    "fewer GPUs than asked": (["trainer.device=cuda", "trainer.n_gpus_per_node=64"], ["trainer.device=cuda: ", "GPU", "found"]),
}


@pytest.mark.parametrize("case", [*CHECKED_BEFORE_START, "all of them"])
def test_found_before_anything_starts(mains: Mains, task: Task, bad_files: dict[str, Path], tmp_path: Path, case: str) -> None:
    if case == "all of them":  # reported together
        settings = [MISSPELT, "data.train_files=[{nameless},{empty}]", "trainer.device=cuda", "trainer.n_gpus_per_node=64"]
        expected = [text for name, (_, texts) in CHECKED_BEFORE_START.items() if "rows" not in name for text in texts]
    else:
        settings, expected = CHECKED_BEFORE_START[case]
    ray_folder, run_folder = tmp_path / "ray", tmp_path / "run"
    arguments = task.arguments(run_folder, "trainer.backend=ray", *(text.format(**bad_files) for text in settings))
    result = mains.run_fresh(arguments, env={"RAY_TMPDIR": str(ray_folder)})
    assert result.code == EXIT_USAGE, result.output
    for text in expected:
        assert text.format(**bad_files) in result.output
    assert "Traceback" not in result.output
    assert not ray_folder.exists() and not run_folder.exists()


def test_an_overlong_prompt_is_an_error_or_left_out(mains: Mains, task: Task, bad_files: dict[str, Path], tmp_path: Path) -> None:
    arguments = task.arguments(
        tmp_path / "run", f"data.train_files={bad_files['long']}", "trainer.backend=ray", "trainer.total_training_steps=1"
    )
    refused = mains.run(arguments)
    assert refused.code == EXIT_USAGE
    assert f"{bad_files['long']}, row 25, column 'prompt': 20 tokens exceed data.max_prompt_length=8" in refused.output
    assert "data.filter_overlong_prompts=True" in refused.output
    assert "Traceback" not in refused.output and "Ray cluster" not in refused.output

    went_on = mains.run([*arguments, "data.filter_overlong_prompts=True", "trainer.backend=local"])
    assert went_on.code == 0, went_on.output
    assert "1 of 25 prompts are longer than 8 tokens and are left out" in went_on.output
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1]


FAULTY_REWARD = """
import os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    kind = {{3: "raise", 5: "hang", 7: "nan"}}.get(extra_info["index"])
    if kind == "raise":
        raise ValueError("this scorer is broken")
    if kind == "hang" and not os.path.exists({mark!r}):
        open({mark!r}, "x").close()
        {says_so}
        time.sleep(1000)
    return float("nan") if kind == "nan" else 0.5
"""
PATIENT_PLUGIN = """
from pathlib import Path
import pytest
from tests.support.hanging import only_hanging_calls_are_late

only_hanging_calls_are_late(pytest.MonkeyPatch(), Path({reward!r}))
"""
SAMPLES, FAILURES = 16, 5  # 8 prompts twice: two of these cannot be scored, and one sample of a third


@pytest.fixture
def faulty(mains: Mains, task: Task, tmp_path: Path) -> Callable[..., Running]:
    """Starts a run of one step over 8 prompts whose reward raises, hangs and returns NaN.  What does not hang is given all the
    time that it takes."""
    reward = tmp_path / "faulty.py"
    reward.write_text(FAULTY_REWARD.format(mark=str(tmp_path / "hangs"), says_so=SAYS_SO))
    (tmp_path / "patient.py").write_text(PATIENT_PLUGIN.format(reward=str(reward)))
    arguments = task.arguments(
        tmp_path / "run",
        f"data.train_files={write_rows(tmp_path / 'eight.parquet', prompt_rows(8))}",
        f"custom_reward_function.path={reward}",
        "reward_model.timeout_s=4",
        "reward_model.num_workers=2",
        "trainer.total_training_steps=1",
        "trainer.plugins=[patient]",
    )
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    return lambda *more: mains.start([*arguments, *more], env=environment)


@pytest.mark.parametrize("policy", ["mask", "zero"])
def test_a_failing_reward_is_counted_and_passed_over(faulty: Callable[..., Running], tmp_path: Path, policy: str) -> None:
    running = faulty(f"reward_model.on_error={policy}", "reward_model.max_error_rate=0.5")
    result = running.wait()
    assert result.code == 0, result.output
    (row,) = rows_of(tmp_path / "run")
    counts = {kind: row[f"reward/num_failed/{kind}"] for kind in ("raised", "timeout", "bad_value")}
    assert counts == {"raised": 2.0, "timeout": 1.0, "bad_value": 2.0}
    assert row["actor/masked_samples"] == (FAILURES if policy == "mask" else 0)
    scored = SAMPLES - FAILURES
    assert row["reward/mean"] == pytest.approx(0.5 if policy == "mask" else 0.5 * scored / SAMPLES)
    assert f"scoring failed for {FAILURES} of {SAMPLES} samples" in result.output
    assert "this scorer is broken" in result.output
    assert running.leftovers() == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["reward_model.on_error=fail"], "reward_model.on_error=fail"),
        ([], "is more than reward_model.max_error_rate=0.1 allows"),  # as it is set by default
    ],
)
def test_a_failing_reward_stops_the_run(faulty: Callable[..., Running], tmp_path: Path, settings: list[str], reason: str) -> None:
    running = faulty(*settings)
    result = running.wait()
    assert result.code not in (0, -signal.SIGKILL)
    assert reason in result.output
    assert rows_so_far(tmp_path / "run") == []
    assert running.leftovers() == []


FLIPPING_PLUGIN = """
import sys
import torch
from rlhub.sharding_manager.route import Route

compare = Route._compare

def flipping(self, live, wanted, sent):  # when everything has been written, before it is read back
    name, (piece, *_) = list(live._pieces.items())[5]
    piece.tensor.view(torch.int32).view(-1)[7] ^= 1  # the lowest bit
    sys.stderr.write(f"flipped a bit of {name}.\\n")
    return compare(self, live, wanted, sent)

Route._compare = flipping
"""


def test_one_flipped_bit_in_the_rollout_engine_is_caught(mains: Mains, task: Task, tmp_path: Path) -> None:
    (tmp_path / "flipping.py").write_text(FLIPPING_PLUGIN)
    arguments = task.arguments(tmp_path / "run", "trainer.plugins=[flipping]")
    result = mains.run(arguments, env={"PYTHONPATH": str(tmp_path)})
    assert result.code not in (0, -signal.SIGKILL)
    name = result.output.partition("flipped a bit of ")[2].partition(".\n")[0]
    assert name
    assert f"the rollout engine does not hold the trainer's {name}:" in result.output
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1]  # no step is taken with the wrong weights


def on_ray(task: Task, run_folder: Path, *more: str) -> list[str]:
    settings = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.ray_init.object_store_memory=200000000")
    return task.arguments(run_folder, *settings, *more)


def test_too_few_places_for_the_ranks(mains: Mains, task: Task, tmp_path: Path) -> None:
    """At once: waiting for places would take longer than the test waits."""
    arguments = on_ray(task, tmp_path / "run", "trainer.ray_init.num_cpus=1", f"trainer.deadline_s.resources={2 * TIMEOUT_S}")
    running = mains.start_fresh(arguments)
    result = running.wait()
    assert result.code == EXIT_USAGE, result.output
    assert "trainer.n_gpus_per_node" in result.output and "num_cpus" in result.output
    assert "Traceback" not in result.output
    assert running.leftovers() == []


def test_a_killed_worker_ends_the_run(mains: Mains, task: Task, tmp_path: Path) -> None:
    """Long before the deadline of the call that it does not answer."""
    folder = tmp_path / "run"
    running = mains.start_fresh(on_ray(task, folder, "trainer.total_training_steps=100000"))
    running.until(lambda: len(rows_so_far(folder)) > 1, "the second step was logged")
    worker = running.writer("actor_rollout_ref-rank1.log")
    worker.kill()
    result = running.wait()
    assert result.code not in (0, -signal.SIGKILL)
    assert f"error: [actor_rollout_ref rank 1 on 127.0.0.1] process {worker.pid} died" in result.output
    assert running.leftovers() == []


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


SHARD, INDEX = "shards-rank00000-00000.safetensors", "shards-rank00000.json"
DAMAGE: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "lost shard": (SHARD, Path.unlink, "No such file or directory"),
    "lost index": (INDEX, Path.unlink, "No such file or directory"),
    "cut shard": (SHARD, lambda path: path.write_bytes(path.read_bytes()[:-100]) and None, "bytes, its manifest says"),
    "flipped bit": (SHARD, flip_a_bit, "has another checksum than its manifest says: its content changed"),
}


def test_a_damaged_checkpoint_is_named_and_not_resumed(mains: Mains, task: Task, tmp_path: Path) -> None:
    """Asked for by name it is an error; found on resuming it is skipped with a warning, and the one before it is taken."""
    folder = tmp_path / "run"
    arguments = task.arguments(folder, "trainer.save_freq=1")
    assert mains.run([*arguments, "trainer.total_training_steps=2"]).code == 0
    newest = folder / "global_step_2"
    named = [*arguments, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={newest}"]
    for file, damage, told in DAMAGE.values():
        path = newest / "actor" / file
        content = path.read_bytes()
        damage(path)
        refused = mains.run(named)
        assert refused.code == 1, refused.output
        assert f"{newest} is damaged: actor/{file}" in refused.output and told in refused.output, refused.output
        assert "Traceback" not in refused.output
        path.write_bytes(content)
    flip_a_bit(newest / "actor" / SHARD)
    resumed = mains.run([*arguments, "trainer.total_training_steps=3"])
    assert resumed.code == 0, resumed.output
    assert f"checkpoint skipped: {newest} is damaged: actor/{SHARD} has another checksum" in resumed.output
    assert "continuing at step 2 of 3" in resumed.output
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3]
