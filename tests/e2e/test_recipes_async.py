"""Recipes of asynchronous training, a few steps each."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from recipes.tool_agent import run as tool_agent
from rlhub.errors import ConfigError
from rlhub.sandboxes.bwrap import usable_mode
from rlhub.tracking.generations import read_generations
from tests.e2e.conftest import Mains
from tests.e2e.test_recipes import IN_PROCESS, RECIPES, run_recipe
from tests.support.metrics import rows_of

SFT_STEPS, RL_STEPS = 40, 2


@pytest.fixture(scope="module")
def warm_start(mains: Mains, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, model and a short warm start, in process: enough to write calls, if not to copy the numbers."""
    folder = tmp_path_factory.mktemp("tool_agent")
    script = RECIPES / "tool_agent"
    for name, more in (("generate.py", ("--demonstrations=2560",)), ("build_model.py", ())):
        target = folder / ("data" if more else "model")
        done = run_recipe(mains, mains.interpreter, str(script / name), "--seed=3", f"--out={target}", *more)
        assert done.returncode == 0, done.stdout + done.stderr
    settings = tool_agent.sft_settings(tool_agent.parse(options(folder)))
    trained = mains.run(
        [*settings, "data.train_batch_size=64", "trainer.device=cpu", "trainer.backend=local"], module="rlhub.trainer.main_sft"
    )
    assert trained.code == 0, trained.output
    return folder


def options(out: Path) -> list[str]:
    return [f"--out={out}", "--seed=3", "--ranks=1", f"--sft-steps={SFT_STEPS}", f"--steps={RL_STEPS}"]


def test_tool_agent(mains: Mains, warm_start: Path) -> None:
    """Episodes call the calculator, its answers are in the transcripts and do not train, and the run learns from the rest."""
    small = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", f"trainer.test_freq={RL_STEPS}")
    command = [
        str(RECIPES / "tool_agent" / "run.py"),
        *options(warm_start),
        *IN_PROCESS,
        *small,
        "trainer.val_before_train=False",
    ]
    done = run_recipe(mains, mains.interpreter, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    run_folder = warm_start / "grpo"
    rows = [row for row in rows_of(run_folder) if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert 0.1 < row["episode/num_turns"] - 1.0 <= row["episode/tool_calls"] + row["episode/tool_malformed"]
    assert abs(rows[0]["mismatch/kl"]) < 1e-5, "the trainer reads the transcripts as the engine wrote them"
    samples = read_generations(run_folder / "generations" / f"val-{RL_STEPS:06d}.jsonl")
    called = [sample for sample in samples if "</tool_response>" in sample.response]
    assert len(samples) == tool_agent.NUM_VALIDATION and called
    assert tool_agent.call_share(run_folder, RL_STEPS) == pytest.approx(len(called) / len(samples), abs=0.2)
    assert "called " in done.stderr and str(run_folder / "report.html") in done.stderr


def test_coding_agent(mains: Mains, tmp_path: Path) -> None:
    """Functions are tested in sandboxes, after a failure once more, and the trainer reads the episodes as they were written."""
    try:
        usable_mode()
    except ConfigError as error:
        pytest.skip(f"no sandbox can be made here: {error}")
    small = ("trainer.device=cpu", "trainer.val_before_train=False")
    command = [str(RECIPES / "coding_agent" / "run.py"), *options(tmp_path), *small]
    done = run_recipe(mains, mains.interpreter, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in rows_of(tmp_path / "grpo") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert 1.0 < row["episode/num_turns"] <= 2.0 and 0.0 <= row["episode/passed_at_once"] <= row["episode/passed"] < 1.0
    assert abs(rows[0]["mismatch/kl"]) < 1e-5
    assert "passed " in done.stderr
