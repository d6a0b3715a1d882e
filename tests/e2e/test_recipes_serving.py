"""The recipes in which something else than the trainer asks for generations: an agent, and a trainer of another job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Mains
from tests.e2e.test_recipes import IN_PROCESS, RECIPES, run_recipe
from tests.support.metrics import rows_of

QUICK = (
    *IN_PROCESS,
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "trainer.val_before_train=False",
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serving")


def options(out: Path) -> list[str]:
    return [f"--out={out}", "--seed=3", "--ranks=1", "--sft-steps=4", "--steps=2", *QUICK]


def test_openai_agent(mains: Mains, out: Path) -> None:
    """The agent's requests are what trains: its reward, the log-probs that the endpoint recorded, no broken history."""
    script = RECIPES / "openai_agent"
    agent = (script / "agent.py").read_text()
    assert "rlhub" not in agent.replace("nothing of rlhub", "")
    done = run_recipe(mains, mains.interpreter, str(script / "run.py"), *options(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in rows_of(out / "openai_agent") if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["episode/openai/requests"] == row["episode/openai/turns"] == 1.0 for row in rows)
    assert abs(rows[0]["mismatch/kl"]) < 1e-5


def test_an_application_that_knows_only_http(mains: Mains, out: Path) -> None:
    """The same task by sessions that another process opens; its rewards are what trains."""
    script = RECIPES / "openai_agent"
    assert not {"rlhub.", "openai import", "rlhub import"} & set((script / "application.py").read_text().split())
    done = run_recipe(mains, sys.executable, str(script / "online.py"), *options(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in rows_of(out / "online") if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["episode/openai/requests"] == row["episode/openai/turns"] == 1.0 for row in rows)
    assert abs(rows[0]["mismatch/kl"]) < 1e-5
    assert not [line for line in done.stderr.splitlines() if line.startswith("http://")], done.stderr


def test_disaggregated(mains: Mains, out: Path) -> None:
    """Trainer and server share a folder and an address; the server's log-probs are those of the weights it was given."""
    environment = {"PYTHONPATH": f"{RECIPES.parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = (sys.executable, str(RECIPES / "disaggregated" / "run.py"), "--engine", "hf")
    remote = "actor_rollout_ref.rollout.name=remote"  # the options name an engine of this process
    done = run_recipe(mains, *command, *options(out), remote, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in rows_of(out / "disaggregated") if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2]
    assert abs(rows[0]["mismatch/kl"]) < 1e-5
    log = (out / "server.log").read_text()
    assert [f"version {version} from" in log for version in range(3)] == [True] * 3, log
