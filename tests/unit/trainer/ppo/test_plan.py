"""Faults of a pipeline are named together before anything starts, and `--dry-run` shows what would run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhub.config.rules.derive import derive
from rlhub.config.sections.ppo import PPOConfig
from rlhub.trainer.ppo.plan import check_pipeline, describe
from tests.unit.trainer.preflight.test_checks import own_folder, problems, put, sound

__all__ = ["own_folder"]  # the fixture
FAULTY = """
from rlhub.pipeline.builtin import ppo

def faulty(config, needs):
    step = ppo(config, needs)
    step.add("late", reads="scorse", after="nothing")
    step.add("again", on="actr", run="compute_log_prob", writes="old_log_probs")
    condition = "step > trainer.warmup"
    step.insert("first", above="sample", run="own.py:absent", reads="scores", writes="x:float33(rows)", when=condition)
    step.add("batch", run="next_batch")
    return step

def values(config, needs):
    step = ppo(config, needs)
    return step.insert("more", below="balance", on="critic", run="compute_values", reads="input_ids", writes="values")

def failing(config, needs):
    return 1 / 0

def fine(config, needs):
    return ppo(config, needs)
"""
FAULTS = (
    *("'late' reads 'scorse', which is no column; did you mean 'scores'?", "'late' comes after 'nothing'"),
    *("'again' is on role 'actr', which there is not; did you mean 'actor'?", "'x' as 'float33', which is no dtype"),
    *("'first' runs", "names 'trainer.warmup', which is no setting", "column 'old_log_probs' is written by"),
    *("node 'first' needs 'score'", "'first' is of no use"),
)
RUN = """
import resource, runpy, sys
sys.argv = ["main_ppo", *sys.argv[1:]]
try:
    runpy.run_module("rlhub.trainer.main_ppo", run_name="__main__")
except SystemExit as stop:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print("\\nended", stop.code, "torch" in sys.modules, "ray" in sys.modules, usage.ru_utime + usage.ru_stime)
"""


@pytest.fixture(autouse=True)
def own_pipelines(own_folder: None) -> None:
    Path("own.py").write_text(FAULTY)


def main_ppo(*arguments: str) -> tuple[int, list[str], str]:
    """Runs the command; returns its status, [torch was loaded, ray was], and all that it said."""
    given = ["data.train_files=rows.jsonl", "actor_rollout_ref.model.path=model", "actor_rollout_ref.rollout.name=hf"]
    command = [sys.executable, "-c", RUN, *given, "trainer.device=cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stdout.splitlines()
    _, status, *loaded, _ = lines[-1].split()
    return int(status), loaded, done.stdout + done.stderr


def test_faults_are_named_together_with_the_other_problems() -> None:
    found = problems(put("trainer.pipeline", "own.py:faulty"))
    for fault in FAULTS:
        assert [text for text in found if fault in text and text.startswith("trainer.pipeline=own.py:faulty: ")], fault


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("pppo", "did you mean 'ppo'?"),
        ("own.py:absent", "absent"),
        ("nowhere.py:mine", "nowhere.py"),
        ("own.py:failing", "it raised ZeroDivisionError: division by zero"),
        ("own.py:values", "node 'more' is on critic, which this job does not have: choose an algorithm.adv_estimator"),
        ("sft", "trainer.pipeline=sft is another command's; of this one: ppo, dapo"),
    ],
)
def test_one_fault(target: str, expected: str) -> None:
    def change(config: PPOConfig) -> None:
        config.trainer.pipeline, config.algorithm.adv_estimator = target, "grpo"

    found = problems(change)
    assert found and expected in " ".join(found), found


@pytest.mark.parametrize("target", [None, "ppo", "dapo", "own.py:fine"])
def test_sound_pipelines_pass(target: str | None) -> None:
    assert problems(put("trainer.pipeline", target)) == []


def test_the_check_takes_a_moment_and_no_torch() -> None:
    config = sound()
    config.trainer.pipeline = "own.py:faulty"
    derive(config)
    started = time.process_time()
    assert check_pipeline(config)
    assert time.process_time() - started < 0.5
    status, loaded, said = main_ppo("trainer.pipeline=own.py:faulty", "--check")
    assert (status, loaded) == (2, ["False", "False"]) and "did you mean 'scores'?" in said
    assert not Path("checkpoints").exists()


@pytest.mark.parametrize("target", ["null", "own.py:fine"])
def test_a_dry_run_starts_nothing(target: str) -> None:
    status, loaded, said = main_ppo(f"trainer.pipeline={target}", "--dry-run")
    assert (status, loaded) == (0, ["False", "False"]) and not Path("checkpoints").exists()
    assert "update_actor  [model_train on actor]  when step > trainer.critic_warmup\n" in said
    assert ("null runs the plain step, which says the same as ppo" in said) is (target == "null")
    assert main_ppo("trainer.pipeline=own.py:faulty", "--dry-run")[0] == 2


def test_a_dry_run_counts_rows_and_bytes() -> None:
    config = sound()
    config.data.train_batch_size, config.actor_rollout_ref.rollout.n = 8, 4
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 4
    config.data.max_prompt_length, config.data.max_response_length = 10, 6
    config.trainer.placement, config.trainer.pools = {"rollout": "generation"}, {"generation": {"n_gpus_per_node": 3}}
    derive(config)
    text = describe(config)
    rows = {tuple(line.split()[:2]): line.split()[2:] for line in text.split("== bytes")[1].splitlines()[2:]}
    assert rows["sample", "compute_log_prob"] == [f"{32 * (2 * 8 * 16 + 6):,}", "0"]
    assert rows["sample", "balance"] == [f"{32 * 8 * 6:,}"] * 2
    assert rows["sample", "score"][0].endswith("+"), "objects are not counted"
    assert "rollout     pool generation, 3 ranks: sample\n" in text and "driver      this process: score, balance\n" in text
    config.algorithm.filter_groups.enable = True
    assert "dynamic_sampling  [model_inference on rollout]" in describe(config)


def test_settings_are_shown() -> None:
    config = sound()
    derive(config)
    assert "model       model\n" in describe(config) and json.dumps("all pass")[1:-1] in describe(config)
