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
from rlhub.pipeline.load import problems_of
from rlhub.trainer.ppo.plan import describe, step_graph
from tests.unit.trainer.preflight.test_checks import own_folder, problems, put, sound

__all__ = ["own_folder"]  # the fixture
FAULTY = """
from rlhub.pipeline.builtin import ppo

ANY = "rlhub.utils.balance:partition"

def faulty(config, needs):
    step = ppo(config, needs)
    step.roles = {"listener": "own.py:Nobody"}
    step.replace("select_tokens", "select_tokens", on="actor", reads="learn_mask", writes="selectd")
    condition = "step > trainer.warmup"
    step.insert("first", above="sample", run="own.py:absent", reads="scores", writes="x:float33(rows)", when=condition)
    step.insert("judge", below="score", on="judge", run="generate_judgements", reads="responses:int64")
    step.insert("style", below="score", run=ANY, reads="responses", writes="style:float32(rows)")
    step.add("late", reads="scorse", after="nothing")
    step.add("again", on="actr", run="compute_log_prob", writes="old_log_probs")
    step.add("old", on="actor", run="compute_log_prob", reads="input_ids")
    step.add("batch", run="next_batch", read="scores")
    step.add("late", run=ANY, reads="scores", gathers="score")
    step.add("trains", run=ANY, reads="scores", trains="critic")
    step.add("hen", run=ANY, after="egg").add("egg", run=ANY, after="hen")
    return step.remove("compute_ref_log_probs")

def values(config, needs):
    step = ppo(config, needs)
    return step.insert("more", below="balance", on="critic", run="compute_values", reads="input_ids", writes="values")

def two(config, needs):
    step = ppo(config, needs)
    step.roles = {"second": "rlhub.workers.actor:ReferenceWorker"}
    return step.insert("look", below="balance", run="compute_ref_log_prob", on="second", reads="input_ids row_order")

def failing(config, needs):
    return 1 / 0

def fine(config, needs):
    return ppo(config, needs)
"""
PLANTED = (
    "node 'batch' has no field 'read'; did you mean 'reads'?",
    "no node 'compute_ref_log_probs'; did you mean 'compute_ref_log_prob'?",
    "role 'listener'=own.py:Nobody: not defined in own.py",
    "node 'late' is declared twice",
    "node 'first' runs own.py:absent: not defined in own.py",
    "names 'trainer.warmup', which is no setting; did you mean 'trainer.critic_warmup'?",
    "writes 'x' as 'float33', which is no dtype; did you mean 'float32'?",
    "node 'judge' is on judge, which this job does not have: set reward_model.judge.model.path",
    "node 'judge' reads 'responses:int64', but responses is int32(rows response)",
    "writes 'selectd', which is no column; did you mean 'selected'?",
    "node 'late' runs 'late', which is no method of the driver",
    "node 'late' reads 'scorse', which is no column; did you mean 'scores'?",
    "node 'late' comes after 'nothing', which is no other node",
    "node 'again' is on role 'actr', which there is not; did you mean 'actor'?",
    "node 'batch' runs 'next_batch', which is no method of the driver",
    "node 'late' gathers 'score', which it does not read; did you mean 'scores'?",
    "node 'trains' trains 'critic' and is on no role: give on='critic'",
    "column 'old_log_probs' is written by 'compute_log_prob' and 'again'",
    "nodes wait for each other in a circle: ",
    "node 'first' needs 'score' (scores), which stands below it",
    "node 'old' uses the weights of actor and stands below 'update_actor'",
    "node 'style' is of no use: no node reads what it writes (style)",
)
"""What is told of each fault of the pipeline."""
RUN = """
import resource, runpy, sys
sys.argv = ["main_ppo", *sys.argv[1:]]
try:
    runpy.run_module("rlhub.trainer.main_ppo", run_name="__main__")
except SystemExit as stop:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print("\\nended", stop.code, "torch" in sys.modules, "ray" in sys.modules, usage.ru_utime + usage.ru_stime)
"""


LEEWAY = 2
"""On a busy machine the same work takes more CPU time."""


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
    return int(status), loaded, done.stderr + done.stdout


def seconds_of(said: str) -> float:
    """The CPU time of a command, the last word that it says."""
    return float(said.split()[-1])


def test_all_faults_are_named_together() -> None:
    """With the other problems of the configuration; a sound pipeline, below, has none."""
    found = problems(put("trainer.pipeline", "own.py:faulty"))
    for fault in PLANTED:
        assert [text for text in found if fault in text and text.startswith("trainer.pipeline=own.py:faulty: ")], fault


def test_a_dry_run_names_all_faults_in_a_moment() -> None:
    """Half a second more than the configuration alone takes, and without torch."""
    status, loaded, said = main_ppo("trainer.pipeline=own.py:faulty", "--dry-run")
    assert (status, loaded) == (2, ["False", "False"]) and not Path("checkpoints").exists()
    assert len(PLANTED) >= 15 and [fault for fault in PLANTED if fault not in said] == []
    seconds = seconds_of(said) - seconds_of(main_ppo("--cfg", "job")[2])
    assert seconds < 0.5 * LEEWAY, f"{seconds:.2f} s"


def test_a_role_of_the_pipelines_own_may_be_placed_and_no_other() -> None:
    def change(config: PPOConfig) -> None:
        config.trainer.pipeline, config.trainer.pools = "own.py:two", {"other": {"n_gpus_per_node": 1}}
        config.trainer.placement = {placed: "other"}

    placed = "second"
    assert problems(change) == []
    placed = "secnd"
    known = "rollout, reference, critic, reward_model, judge, environments, second"
    assert problems(change) == [f"trainer.placement.secnd: no such role; did you mean 'second'? known: {known}"]


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
    assert problems_of(lambda: step_graph(config))
    assert time.process_time() - started < 0.5 * LEEWAY
    status, loaded, said = main_ppo("trainer.pipeline=own.py:faulty", "--check")
    assert (status, loaded) == (2, ["False", "False"]) and "did you mean 'scores'?" in said
    assert not Path("checkpoints").exists()


@pytest.mark.parametrize("target", ["null", "own.py:fine"])
def test_a_dry_run_starts_nothing(target: str) -> None:
    status, loaded, said = main_ppo(f"trainer.pipeline={target}", "--dry-run")
    assert (status, loaded) == (0, ["False", "False"]) and not Path("checkpoints").exists()
    assert "update_actor  [model_train on actor]  when step > trainer.critic_warmup\n" in said
    assert ("null runs the plain step, which says the same as ppo" in said) is (target == "null")


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
    memory = describe(config).split("== memory\n")[1].split("\n\n")[0].splitlines()
    assert [line.split(": ")[1] for line in memory] == ["generation", "update of actor", "update of critic"]
    assert all(line.endswith(" in a process") for line in memory)
    assert "model       model\n" in describe(config) and json.dumps("all pass")[1:-1] in describe(config)
