"""The recipe's rows, from published form to score, and its commands up to the model that is not there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from rlhub.data.files import check_files, load_rows
from rlhub.rewards import RewardPool, RewardRequest

RECIPE = Path(__file__).parents[2] / "recipes" / "gsm8k"


def preprocess(source: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RECIPE / "preprocess.py"), "--source", str(source), "--out", str(out)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_rows_load_and_their_own_answers_score_one(tmp_path: Path) -> None:
    done = preprocess(RECIPE / "sample", tmp_path)
    assert done.returncode == 0, done.stderr
    assert pq.read_metadata(tmp_path / "train.parquet").num_rows == 8
    requests, wrong = [], []
    for split in ("train", "test"):
        path = str(tmp_path / f"{split}.parquet")
        assert check_files(path, "prompt", split) == []
        for row in load_rows(path):
            values = row.values
            assert [message["role"] for message in values["prompt"]] == ["user"]
            assert values["prompt"][0]["content"].startswith(values["extra_info"]["question"])
            truth, answer = values["reward_model"]["ground_truth"], values["extra_info"]["answer"]
            source = values["data_source"]
            requests.append(
                RewardRequest(data_source=source, solution_str=answer, ground_truth=truth, extra_info=values["extra_info"])
            )
            wrong.append(RewardRequest(data_source=source, solution_str=answer.split("####")[0], ground_truth=truth))
    pool = RewardPool("rlhub.rewards.registry:compute_score", num_workers=1)
    assert [outcome.score for outcome in pool.score(requests)] == [1.0] * 12
    assert [outcome.score for outcome in pool.score(wrong)] == [0.0] * 12
    pool.close()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"question": "q"}', "line 1"),
        ('{"question": "q", "answer": "no mark"}', "line 1"),
        ("not json", "line 1"),
        ("", "no rows"),
    ],
)
def test_unusable_source_files_are_named(tmp_path: Path, line: str, says: str) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(line)
    done = preprocess(tmp_path, tmp_path / "out")
    assert done.returncode == 2 and says in done.stderr and "train.jsonl" in done.stderr and "Traceback" not in done.stderr
    assert "no such file" in preprocess(tmp_path / "nowhere", tmp_path / "out").stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("script", "estimator"), [("grpo", "grpo"), ("ppo", "gae")])
def test_the_commands_are_valid_configurations(tmp_path: Path, script: str, estimator: str) -> None:
    (tmp_path / "question.jsonl").write_text(json.dumps({"question": "q", "answer": "#### 1"}))
    environment = {**os.environ, "PYTHON": sys.executable, "DATA": str(tmp_path)}
    command = ["bash", str(RECIPE / f"{script}.sh"), "--cfg", "job", "trainer.n_gpus_per_node=1", "trainer.total_epochs=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert shown["algorithm"]["adv_estimator"] == estimator
    assert shown["data"]["train_files"] == f"{tmp_path}/train.parquet"
    assert shown["trainer"]["total_epochs"] == 2, "settings given by the user come last"


def test_the_commands_stop_at_what_is_missing_not_at_a_key(tmp_path: Path) -> None:
    """Without --cfg the checks before start run too: data is there, the model is not; a misspelt key is named (control)."""
    assert preprocess(RECIPE / "sample", tmp_path).returncode == 0
    environment = {**os.environ, "PYTHON": sys.executable, "DATA": str(tmp_path), "MODEL": str(tmp_path / "no-model")}
    for extra, says in (([], "no-model"), (["trainer.total_epoch=2"], "total_epochs")):
        command = ["bash", str(RECIPE / "grpo.sh"), "trainer.n_gpus_per_node=1", "data.train_batch_size=8", *extra]
        command.append("actor_rollout_ref.actor.ppo_mini_batch_size=8")
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
        assert done.returncode == 2 and says in done.stdout + done.stderr, done.stdout + done.stderr
        assert ("total_epoch" in done.stdout + done.stderr) == bool(extra)
