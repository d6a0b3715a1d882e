"""What recipes share: their stages survive Ctrl-C as the commands alone would, and are not taken for done when they are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from recipes import stages
from recipes.async_grpo import run as async_grpo
from recipes.dpo.run import is_evaluation_of

ROOT = Path(__file__).parents[2]
SAVES_WHEN_STOPPED = """
import signal, sys, time
def stop(number, frame):
    time.sleep(1)  # longer than subprocess.run lets a child live
    print("saved", flush=True)
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)
print("running", flush=True)
time.sleep(600)
"""
CALLER = "import sys; from recipes import stages; sys.exit(stages.call_through([sys.executable, '-c', sys.argv[1]]))"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stage_that_is_stopped_may_save(number: signal.Signals) -> None:
    """As a terminal does, Ctrl-C goes to both; SIGTERM to the recipe alone."""
    command = [sys.executable, "-c", CALLER, SAVES_WHEN_STOPPED]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as recipe:
        assert recipe.stdout is not None
        assert recipe.stdout.readline() == "running\n"
        if number == signal.SIGINT:
            os.killpg(recipe.pid, number)
        else:
            recipe.send_signal(number)
        assert recipe.stdout.read() == "saved\n"
    assert recipe.returncode == 128 + number


def test_a_command_that_is_killed_has_a_status() -> None:
    assert stages.call_through([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]) == 128 + signal.SIGKILL


def test_recipes_modules_are_found_from_any_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert stages.call_through([sys.executable, "-c", "import recipes.stages"]) == 0


def test_settings_may_stand_behind_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line of recipes/async_grpo/README.md."""
    commands: list[Sequence[str]] = []

    def note(command: Sequence[str]) -> int:
        commands.append(command)
        return 3

    monkeypatch.setattr(stages, "call_through", note)
    settings = ["trainer.backend=local", "trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.name=hf"]
    assert async_grpo.main(["--staleness", "4", *settings, "--sft-steps", "9"]) == 3
    (command,) = commands
    assert "trainer.max_staleness=4" in command
    assert command[-5:] == ["--sft-steps", "9", *settings]


def test_an_evaluation_is_of_one_model(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.yaml").write_text("actor_rollout_ref:\n  model:\n    path: /runs/global_step_6/model\n")
    assert is_evaluation_of(Path("/runs/global_step_6/model"), tmp_path)
    assert not is_evaluation_of(Path("/runs/global_step_100/model"), tmp_path)
