"""An advantage estimator and a policy loss of a user's own: one file outside the package, named in trainer.plugins.

Two ranks through Ray learn with them, their knobs are checked by their own classes before anything starts, and what they
measure is in the metrics.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.chat_model import save_chat_model
from tests.support.metrics import rows_of

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900.0
PLUGIN = '''
"""Rewards less the batch's mean, times a scale; a plain policy gradient on a random share of the tokens."""

from dataclasses import dataclass

import torch

from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs, PolicyLossInputs, PolicyLossOutputs, SelectionInputs
from rlhub.algorithms.masked import masked, masked_sum
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES


@dataclass(slots=True, kw_only=True)
class CentredKnobs:
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scale <= 0:
            raise ValueError(f"scale must be above 0, got {self.scale}")


@ADVANTAGE_ESTIMATORS.register("centred", knobs=CentredKnobs)
def centred(inputs: AdvantageInputs, knobs: CentredKnobs) -> AdvantageOutputs:
    rewards = masked_sum(inputs.token_level_rewards, inputs.response_mask, dim=1)
    advantages = masked((knobs.scale * (rewards - rewards.mean()))[:, None].expand_as(inputs.response_mask), inputs.response_mask)
    return AdvantageOutputs(advantages=advantages, returns=advantages, metrics={"centred/scale": knobs.scale})


@dataclass(slots=True, kw_only=True)
class ThinnedKnobs:
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be in (0, 1], got {self.share}")


def choose(inputs: SelectionInputs, knobs: ThinnedKnobs) -> torch.Tensor:
    return masked((inputs.keys < knobs.share).long(), inputs.response_mask)


@POLICY_LOSSES.register("thinned", requires={"old_log_probs"}, knobs=ThinnedKnobs, companions={"select": choose})
def thinned(inputs: PolicyLossInputs, knobs: ThinnedKnobs) -> PolicyLossOutputs:
    chosen = masked(inputs.selected, inputs.response_mask)
    loss = masked(-inputs.advantages * inputs.log_probs, chosen)
    return PolicyLossOutputs(loss=loss, sums={"thinned_share": chosen.sum().double()})
'''
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(ord(letter) % 2 for letter in solution_str) / max(len(solution_str), 1)
"""
SCALE, SHARE = 7.0, 0.3


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: model, rows, reward and one plugin file."""
    folder = tmp_path_factory.mktemp("project")
    save_chat_model(folder / "model", max_positions=64)
    rows = [{"prompt": f"{n} + 1 =", "data_source": "sums", "reward_model": {"ground_truth": str(n + 1)}} for n in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    (folder / "my_algorithms.py").write_text(PLUGIN)
    return folder


def train(project: Path, run_folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """From the user's folder, as a user would; rlhub is installed or on the path, the plugin beside the data."""
    command = [
        sys.executable, "-m", "rlhub.trainer.main_ppo",
        "data.train_files=train.parquet", "data.train_batch_size=8", "data.max_prompt_length=16", "data.max_response_length=8",
        "actor_rollout_ref.model.path=model", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.name=hf",
        "custom_reward_function.path=reward.py", "reward_model.num_workers=1", "trainer.device=cpu", "trainer.n_gpus_per_node=2",
        "trainer.ray_init.object_store_memory=200000000", "trainer.total_training_steps=3",
        "trainer.plugins=[my_algorithms]", "algorithm.adv_estimator=centred",
        "actor_rollout_ref.actor.policy_loss.loss_mode=thinned", f"trainer.default_local_dir={run_folder}", *more,
    ]  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environment = {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, stdin=subprocess.DEVNULL
    )


def test_two_ranks_learn_with_a_plugins_estimator_and_loss(project: Path, tmp_path: Path) -> None:
    knobs = (f"algorithm.adv_kwargs.scale={SCALE}", f"actor_rollout_ref.actor.policy_loss.kwargs.share={SHARE}")
    done = train(project, tmp_path / "run", *knobs)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["centred/scale"] == SCALE
        above = SCALE * (row["critic/score/max"] - row["critic/score/mean"])
        assert row["critic/advantages/max"] == pytest.approx(above, rel=1e-4)
        assert row["actor/grad_norm"] > 0.0 and row["actor/optimizer_steps"] == 2.0
        # about 230 tokens a step, each chosen with probability 0.3
        assert row["actor/thinned_share"] == pytest.approx(SHARE, abs=0.15) and row["actor/thinned_share"] < 0.6


def test_bad_knobs_of_a_plugin_are_reported_together_before_anything_starts(project: Path, tmp_path: Path) -> None:
    """The control: the knobs above were checked by the plugin's own classes."""
    knobs = ("algorithm.adv_kwargs.scale=-1", "actor_rollout_ref.actor.policy_loss.kwargs.shar=0.5")
    done = train(project, tmp_path / "run", *knobs)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "algorithm.adv_kwargs: scale must be above 0, got -1" in done.stderr
    assert "policy_loss.kwargs.shar: no such knob; did you mean 'share'?" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_without_the_plugin_its_names_are_unknown(project: Path, tmp_path: Path) -> None:
    done = train(project, tmp_path / "run", "trainer.plugins=[]")
    assert done.returncode == 2
    assert "no advantage estimator 'centred'" in done.stderr and "no policy loss 'thinned'" in done.stderr
    assert "trainer.plugins" in done.stderr
