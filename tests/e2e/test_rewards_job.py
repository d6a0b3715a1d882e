"""Rewards in whole jobs: those that fail, those of episodes that end in context, and the record of what trained when."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.conftest import Mains, Task, prompt_rows, write_rows
from tests.support.metrics import rows_of

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "raise":
        raise ValueError("no ground truth")
    return 1.0
"""
CLOSED = """
from rlhub.agents.workflows.base import RolloutWorkflow
from rlhub.agents.trajectory import NOT_SAMPLED, Trajectory


class Closed(RolloutWorkflow):
    "One generation, after which the environment has the last word; a longer response is better."

    async def arun_episode(self, engine, data):
        said = await engine.agenerate(self.request(data), self.parts.sampling)
        own, closing = said.token_ids[:4], [5, 6]
        made = Trajectory(
            prompt_ids=list(data.prompt_ids),
            response_ids=own + closing,
            response_mask=[1] * len(own) + [0, 0],
            rollout_log_probs=said.log_probs[:4] + [0.0, 0.0],
            versions=said.versions[:4] + [NOT_SAMPLED, NOT_SAMPLED],
        )
        if self.parts.kwargs["scored"]:
            made.set_reward(sum(token % 2 for token in own) / 4)
        return made
"""
PARITY = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(int(word[1:]) % 2 for word in solution_str.split() if word[1:].isdigit()) / 6
"""
MODES = {
    "sync": (),
    "beside training": ("actor_rollout_ref.rollout.mode=async", "trainer.max_staleness=1"),
}


def half_failing(folder: Path) -> list[str]:
    """Of 8 validation prompts with two samples each, two cannot be scored."""
    rows = prompt_rows(8, words=3)
    for row in rows[:2]:
        row["reward_model"]["ground_truth"] = "raise"
    (folder / "reward.py").write_text(REWARD)
    return [
        f"data.val_files={write_rows(folder / 'val.parquet', rows)}",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "reward_model.max_error_rate=0.25",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
    ]


EXCLUDED = {"val/pass@1": 1.0, "val/pass@2": 1.0, "val/reward/mean": 1.0}
AS_ZERO = {"val/pass@1": 0.75, "val/pass@2": 0.75, "val/reward/mean": 0.75}
COUNTED = {"val/reward/num_failed": 4.0, "val/reward/num_failed/raised": 4.0, "val/reward/failed_share": 0.25}


@pytest.mark.parametrize("mode", MODES)
def test_rewards_that_fail_in_validation_are_excluded_and_counted_as_in_training(
    mode: str, mains: Mains, task: Task, tmp_path: Path
) -> None:
    """A correct model whose rewards fail in a quarter of the rows is not three quarters correct."""
    arguments = task.arguments(tmp_path / "run", *half_failing(tmp_path), *MODES[mode], "trainer.total_training_steps=1")
    result = mains.run([*arguments, "trainer.test_freq=1"])
    assert result.code == 0, result.output
    for row in rows_of(tmp_path / "run"):
        assert {name: row.get(name) for name in EXCLUDED | COUNTED} == EXCLUDED | COUNTED
    stopped = mains.run([*arguments, "reward_model.on_error=fail", f"trainer.default_local_dir={tmp_path / 'fail'}"])
    assert stopped.code != 0 and "on_error=fail" in stopped.output


@pytest.mark.parametrize(("on_error", "expected"), [("mask", EXCLUDED), ("zero", AS_ZERO)])
def test_an_evaluation_says_how_many_rewards_failed(
    on_error: str, expected: dict[str, float], mains: Mains, task: Task, tmp_path: Path
) -> None:
    arguments = task.arguments(tmp_path / "run", *half_failing(tmp_path), f"reward_model.on_error={on_error}")
    chosen = [one for one in arguments if one.startswith(("data.max", "data.val", "actor_rollout_ref.model", "actor_rollout_ref."
        "rollout.name", "actor_rollout_ref.rollout.val", "custom", "reward_model", "trainer.d", "trainer.backend"))]  # fmt: skip
    result = mains.run(chosen, module="rlhub.trainer.main_eval")
    assert result.code == 0, result.output
    (row,) = rows_of(tmp_path / "run")
    assert {name: row.get(name) for name in expected | COUNTED} == expected | COUNTED
    assert "val/reward/num_failed: 4.0000" in result.output


@pytest.mark.parametrize("scored", [True, False], ids=["the workflow's own reward", "the reward function"])
def test_the_reward_of_an_episode_that_ends_in_context_trains(scored: bool, mains: Mains, task: Task, tmp_path: Path) -> None:
    """A reward on the closing observation left every advantage 0.  And each prompt's line names the step that trained it."""
    (tmp_path / "closed.py").write_text(CLOSED)
    (tmp_path / "reward.py").write_text(PARITY)
    steps, agent = 5, "actor_rollout_ref.rollout.agent"
    result = mains.run(
        task.arguments(
            tmp_path / "run",
            "actor_rollout_ref.rollout.mode=async",
            "trainer.max_staleness=2",
            "algorithm.rollout_correction.rollout_is=token",
            f"{agent}.default_agent_loop={tmp_path / 'closed.py'}:Closed",
            f"{agent}.kwargs.scored={scored}",
            f"custom_reward_function.path={tmp_path / 'reward.py'}",
            f"trainer.total_training_steps={steps}",
        )
    )
    assert result.code == 0, result.output
    trained = [row for row in rows_of(tmp_path / "run") if row["step"] > 0]
    assert all(row["critic/advantages/max"] > 0 and row["actor/grad_norm"] > 0 for row in trained)
    assert all(row["reward/mean"] > 0 for row in trained)
    ends = [json.loads(line) for line in (tmp_path / "run" / "prompts.jsonl").read_text().splitlines()]
    assert Counter(line["step"] for line in ends if line["end"] == "trained") == dict.fromkeys(range(1, steps + 1), 8)
