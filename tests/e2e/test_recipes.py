"""Each recipe runs as its documentation says, on a tiny model and few steps."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlhub.tracking.generations import read_generations
from tests.e2e.conftest import Mains, Task
from tests.support.chat_model import save_chat_model
from tests.support.metrics import rows_of

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
TIMEOUT_S = 600.0
IN_PROCESS = ("trainer.device=cpu", "trainer.backend=local", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=hf")


def run_recipe(mains: Mains, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A command of a recipe, from another folder, as a user would give it."""
    environment = {**mains.env, "PYTHON": sys.executable, **variables}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, cwd=mains.folder, stdin=subprocess.DEVNULL
    )


def test_minimal_grpo(mains: Mains, task: Task, tmp_path: Path) -> None:
    """Two steps of the README's example: it samples, scores and learns, and its engine has the trainer's weights."""
    script = RECIPES / "minimal_grpo" / "grpo.py"
    assert len(script.read_text().splitlines()) <= 60
    steps = "trainer.total_training_steps=2"
    done = run_recipe(mains, sys.executable, str(script), *task.arguments(tmp_path, *IN_PROCESS, steps))
    assert done.returncode == 0, done.stdout + done.stderr
    seen = re.findall(r"step (\d+) reward (\d\.\d+) mismatch (\S+)", done.stderr)
    assert [int(step) for step, *_ in seen] == [1, 2], done.stderr
    assert all(0.0 < float(reward) < 1.0 and abs(float(mismatch)) < 1e-5 for _, reward, mismatch in seen)


def test_gsm8k(mains: Mains, tmp_path: Path) -> None:
    """Rows in their published form through every stage: chat template, generation, scorer, update, validation, save."""
    source = RECIPES / "gsm8k" / "sample"
    prepared = run_recipe(
        mains, sys.executable, str(RECIPES / "gsm8k" / "preprocess.py"), "--source", str(source), "--out", str(tmp_path / "data")
    )
    assert prepared.returncode == 0, prepared.stderr
    model = save_chat_model(tmp_path / "model", max_positions=1024)
    settings = (
        *IN_PROCESS, "data.train_batch_size=4", "data.max_response_length=16", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.actor.entropy_coeff=0.01", "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=3", "trainer.test_freq=3", "trainer.save_freq=3", "trainer.log_val_generations=4",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    )  # fmt: skip
    command = ["bash", str(RECIPES / "gsm8k" / "grpo.sh"), *settings]
    done = run_recipe(mains, *command, MODEL=str(model), DATA=str(tmp_path / "data"))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert "val/openai/gsm8k/pass@1" in rows[0] and "val/pass@1" in rows[3]
    for row in rows[1:]:
        assert row["reward/num_failed"] == 0 and abs(row["mismatch/kl"]) < 1e-5 and row["actor/kl_loss"] >= 0.0
        assert row["actor/grad_norm"] > 0.0, "the entropy bonus has a gradient even where every answer is wrong"
    assert rows[3]["actor/kl_loss"] > 0.0
    samples = read_generations(tmp_path / "run" / "generations" / "val-000000.jsonl")
    assert len(samples) == 4 and all("####" in sample.prompt and sample.prompt.startswith("<turn>user") for sample in samples)
    assert (tmp_path / "run" / "global_step_3" / "actor" / "huggingface" / "model.safetensors").is_file()


ARITHMETIC_SFT_STEPS = 30


@pytest.fixture(scope="module")
def arithmetic(mains: Mains, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    out = tmp_path_factory.mktemp("arithmetic")
    shutil.rmtree(out)
    command = [
        mains.interpreter, str(RECIPES / "arithmetic" / "run.py"), f"--out={out}", "--seed=3", "--ranks=1",
        f"--sft-steps={ARITHMETIC_SFT_STEPS}", "--steps=2", *IN_PROCESS, "trainer.test_freq=2",

    ]  # fmt: skip
    return command, out


def test_arithmetic(mains: Mains, arithmetic: tuple[list[str], Path]) -> None:
    """The quickstart's program: data, model, warm start, reinforcement learning; run again it repeats none of them."""
    command, out = arithmetic
    done = run_recipe(mains, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert str(out / "grpo" / "report.html") in done.stderr and (out / "grpo" / "report.html").is_file()
    rows = rows_of(out / "grpo")
    assert [row["step"] for row in rows] == [0, 1, 2] and "val/pass@1" in rows[0] and "val/pass@1" in rows[2]
    assert f"right {rows[0]['val/pass@1']:.3f}" in done.stderr
    losses = [row["train/loss"] for row in rows_of(out / "sft")]
    assert len(losses) == ARITHMETIC_SFT_STEPS and losses[-1] < 0.7 * losses[0]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}

    again = run_recipe(mains, *command)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "this run already finished" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")} == before
    assert rows_of(out / "grpo") == rows


def test_an_unknown_setting_stops_a_recipe(mains: Mains, task: Task, tmp_path: Path) -> None:
    """Control: the checks above can fail, and a recipe reports a bad setting as the mains do."""
    script = str(RECIPES / "minimal_grpo" / "grpo.py")
    done = run_recipe(mains, sys.executable, script, *task.arguments(tmp_path, "trainer.total_training_step=2"))
    assert done.returncode == 2 and "total_training_steps" in done.stderr and "Traceback" not in done.stderr
    assert not os.listdir(tmp_path)


PROGRAM = """
import os, signal, subprocess, sys
sys.stdout.write(f"{sys.argv[1:]} {os.getcwd()} {os.environ['WORD']} {__name__} {os.path.basename(__file__)}")
sys.stderr.write("told on stderr")
if sys.argv[1] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
inner = subprocess.run([sys.executable, "-c", "import sys; sys.exit(4)"]).returncode if sys.argv[1] == "start" else 0
sys.exit(int(sys.argv[2]) + inner)
"""


@pytest.mark.parametrize("arguments", [("end", "0"), ("end", "3"), ("start", "1"), ("die", "0")])
def test_the_preloaded_interpreter_does_what_the_fresh_one_does(mains: Mains, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """Of what the recipes here are run by: the same output, status and end."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    fresh, preloaded = (
        run_recipe(mains, python, str(script), *arguments, WORD="a b") for python in (sys.executable, mains.interpreter)
    )
    assert (preloaded.returncode, preloaded.stdout, preloaded.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)
    assert fresh.returncode == {"end": int(arguments[1]), "start": 5, "die": -9}[arguments[0]]
