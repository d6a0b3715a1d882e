"""What cannot work is refused by the commands themselves before they start a worker: a run that its checkpoint does not fit,
parts of the user's own that are not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import Mains, Result, Task
from tests.support.metrics import rows_of

EXIT_USAGE = 2
AGENT = "actor_rollout_ref.rollout.agent"
WORKFLOW = """
from dataclasses import dataclass
from rlhub.agents.workflows.registry import fill_knobs
from rlhub.agents.workflows.turns import SingleTurn

@dataclass
class Knobs:
    num_tries: int = 1

class Tries(SingleTurn):
    def __init__(self, parts):
        super().__init__(parts)
        self.knobs = fill_knobs(Knobs, parts.kwargs)
"""


def refused(result: Result, *said: str) -> None:
    assert result.code == EXIT_USAGE, result.output
    for text in said:
        assert text in result.output, result.output
    assert "Traceback" not in result.output and "starting " not in result.output, result.output


def test_a_run_is_not_gone_on_with_under_settings_that_its_checkpoint_does_not_fit(
    mains: Mains, task: Task, tmp_path: Path
) -> None:
    folder, model = tmp_path / "run", "actor_rollout_ref.model"

    def arguments(steps: int, *settings: str) -> list[str]:
        return task.arguments(folder, f"trainer.total_training_steps={steps}", *settings)

    first = mains.run(arguments(1, f"{model}.lora_rank=4"))
    assert first.code == 0, first.output
    for settings, said in (
        ([f"{model}.lora_rank=8"], f"{model}.lora_rank was 4 and is 8 now"),
        ([], f"{model}.lora_rank was 4 and is 0 now"),
        ([f"{model}.lora_rank=4", f"{model}.lora_alpha=64"], f"{model}.lora_alpha was 16 and is 64 now"),
        ([f"{model}.lora_rank=4", "algorithm.adv_estimator=gae"], "it holds no critic, which algorithm.adv_estimator=gae trains"),
    ):
        result = mains.run(arguments(2, *settings))
        refused(result, f"cannot go on from {folder / 'global_step_1'}: {said}", "set it back", "trainer.resume_mode=disable")
    other = mains.run(arguments(2, f"{model}.lora_rank=4", "data.seed=9"))
    refused(other, "data.seed was", "and is 9 now: set it back")
    edited, secret = tmp_path / "reward.py", "+trainer.ray_init.runtime_env.env_vars.LOGIN=hunter2"
    edited.write_text((task.folder / "reward.py").read_text())
    went_on = mains.run(arguments(2, f"{model}.lora_rank=4", f"custom_reward_function.path={edited}", "trainer.seed=5", secret))
    assert went_on.code == 0 and "trainer.seed: 1 -> 5" in went_on.output and "was edited" not in went_on.output, went_on.output
    edited.write_text(f"# edited\n{edited.read_text()}")
    longer = mains.run(arguments(3, f"{model}.lora_rank=4", f"custom_reward_function.path={edited}", "trainer.seed=5", secret))
    assert longer.code == 0 and f"custom_reward_function.path={edited} is another file, or was edited since" in longer.output, (
        longer.output
    )
    assert "trainer.ray_init: " not in longer.output, "what is hidden is no change"
    written = {
        path: path.read_text(errors="replace")
        for path in folder.rglob("*")
        if path.suffix in (".yaml", ".html", ".jsonl", ".log")
    }
    assert {folder / "config.yaml", folder / "report.html"} <= written.keys()
    assert "hunter2" not in longer.output and not [path for path, text in written.items() if "hunter2" in text]
    assert [row["step"] for row in rows_of(folder)] == [1, 2, 3]
    anew = mains.run(arguments(1, f"{model}.lora_rank=8", "trainer.resume_mode=disable"))
    assert anew.code == 0, anew.output


def test_a_tracker_without_a_login_is_refused_in_one_line_before_anything_starts(
    mains: Mains, task: Task, tmp_path: Path
) -> None:
    """It used to be found when the workers were up, below a traceback of the tracker's."""
    away = {"HOME": str(tmp_path), "WANDB_MODE": "online", "WANDB_API_KEY": "", "NETRC": str(tmp_path / "netrc")}
    arguments = task.arguments(tmp_path / "run", "trainer.logger=[console,wandb]", "trainer.backend=ray")
    result = mains.run_fresh(arguments, env=away)
    refused(result, "error: trainer.logger names wandb", "`wandb login`", "WANDB_API_KEY", "WANDB_MODE=offline")
    assert not (tmp_path / "run").exists() and len(result.output.strip().splitlines()) == 1
    assert "ok" in mains.run_fresh([*arguments, "--check"], env={**away, "WANDB_MODE": "offline"}).output


@pytest.mark.parametrize(
    "setting",
    ["actor_rollout_ref.rollout.top_k=0", "trainer.seed=100000000000000000000000", "actor_rollout_ref.actor.entropy_coeff=nan"],
)
def test_numbers_that_no_step_could_be_made_with(mains: Mains, task: Task, tmp_path: Path, setting: str) -> None:
    refused(mains.run(task.arguments(tmp_path / "run", setting)), setting.partition("=")[0], "expected")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((f"{AGENT}.default_agent_loop={{file}}:Tris",), ("not defined in {file}", "did you mean 'Tries'?")),
        (
            (f"{AGENT}.default_agent_loop={{file}}:Tries", f"{AGENT}.kwargs={{{{num_trys: 2}}}}"),
            (f"{AGENT}.kwargs.num_trys: no such knob; did you mean 'num_tries'?",),
        ),
    ],
)
def test_a_workflow_of_the_users_own(
    mains: Mains, task: Task, tmp_path: Path, settings: tuple[str, ...], said: tuple[str, ...]
) -> None:
    file = tmp_path / "flows.py"
    file.write_text(WORKFLOW)
    filled = [text.format(file=file) for text in settings]
    result = mains.run(task.arguments(tmp_path / "run", "actor_rollout_ref.rollout.mode=async", *filled))
    refused(result, *(text.format(file=file) for text in said))
    assert not (tmp_path / "run").exists()
