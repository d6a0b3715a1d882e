"""Where a role runs changes nothing that is learned: PPO with everything (critic, reference, reward model, KL in the reward)
in one process, apart on pools of their own, and resumed from one placement into another."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from rlhub.config.cli import prepare
from rlhub.config.schema import to_dict
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import WorkerDiedError
from rlhub.trainer.ppo.trainer import PPOTrainer, build_data, build_evaluation, build_trainer
from rlhub.trainer.preflight.checks import check
from rlhub.trainer.run import Run
from tests.support.chat_model import save_chat_model
from tests.support.metrics import rows_of
from tests.support.processes import all_end
from tests.support.reward_models import save_reward_model

STEPS = 3
VARYING = ("timing_", "perf/", "memory/")
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(ord(letter) % 2 for letter in solution_str) / max(len(solution_str), 1)
"""
APART = (
    "trainer.pools={generation: {}, frozen: {}, value: {}}",
    "trainer.placement={rollout: generation, reference: frozen, reward_model: frozen, critic: value}",
)
ROLLOUT_APART = ("trainer.pools.generation.n_gpus_per_node=2", "trainer.placement.rollout=generation")


@dataclass(slots=True, kw_only=True)
class Job:
    """Overrides for a run in `folder`, on data and models of its own."""

    folder: Path

    def config(self, name: str, *more: str) -> PPOConfig:
        overrides = [
            f"data.train_files={self.folder / 'train.parquet'}",
            f"data.val_files={self.folder / 'val.parquet'}",
            "data.train_batch_size=4",
            "data.max_prompt_length=24",
            "data.max_response_length=6",
            f"actor_rollout_ref.model.path={self.folder / 'model'}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.actor.kl_loss_type=low_var_kl+",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.name=hf",
            "algorithm.adv_estimator=gae",
            "algorithm.use_kl_in_reward=true",
            f"custom_reward_function.path={self.folder / 'reward.py'}",
            "reward_model.enable=true",
            f"reward_model.model.path={self.folder / 'reward'}",
            "reward_model.num_workers=1",
            "trainer.device=cpu",
            f"trainer.total_training_steps={STEPS}",
            "trainer.save_freq=1",
            "trainer.test_freq=3",
            "trainer.logger=[]",
            f"trainer.default_local_dir={self.folder / name}",
            *more,
        ]
        return prepare(PPOConfig, "ppo", overrides, preflight=check)

    def metrics(self, name: str) -> list[dict[str, Any]]:
        rows = rows_of(self.folder / name)
        return [{key: value for key, value in row.items() if not key.startswith(VARYING)} for row in rows]

    def weights(self, name: str, model: str) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / f"global_step_{STEPS}" / model / "huggingface" / "model.safetensors")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("placement")
    save_chat_model(folder / "model")
    save_reward_model(folder / "reward", folder / "model")
    (folder / "reward.py").write_text(REWARD)
    rows = [
        {"prompt": f"say {3 * i}", "data_source": "words", "reward_model": {"style": "rule", "ground_truth": str(i)}}
        for i in range(14)
    ]
    pq.write_table(pa.Table.from_pylist(rows[:12]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[12:]), folder / "val.parquet")
    return Job(folder=folder)


class Started:
    """A trainer with its workers, ended by `close`."""

    def __init__(self, config: PPOConfig) -> None:
        self.stack = ExitStack()
        data = build_data(config)
        self.run = self.stack.enter_context(Run(config.trainer, to_dict(config), data.total_steps))
        self.trainer: PPOTrainer = build_trainer(config, data, self.run, self.stack)
        groups = self.trainer.groups
        self.pids = {w.pid for g in (groups.actor, groups.rollout, groups.reference, groups.critic) if g for w in g.workers}

    def fit(self) -> None:
        self.run.start()
        assert self.trainer.fit() == STEPS

    def close(self) -> None:
        self.stack.close()
        assert all_end(self.pids)


@pytest.fixture(scope="module")
def together(ray_cluster: None, job: Job) -> Job:
    """The run that the others are compared with: one process."""
    started = Started(job.config("together"))
    assert len(started.pids) == 1
    started.fit()
    started.close()
    return job


@pytest.fixture(scope="module")
def apart(together: Job) -> Iterator[Started]:
    started = Started(together.config("apart", *APART))
    yield started
    started.close()


def test_everything_apart_learns_the_same(together: Job, apart: Started) -> None:
    """Bit for bit: metrics of every step and validation, weights of actor and critic."""
    assert len(apart.pids) == 4
    apart.fit()
    expected, got = together.metrics("together"), together.metrics("apart")
    assert got == expected and [row["step"] for row in got] == [0, 1, 2, 3]
    last = got[-1]
    assert {"critic/vf_loss", "actor/kl_loss", "actor/reward_kl_penalty", "reward/model", "val/pass@1"} <= set(last)
    assert last["actor/kl_loss"] > 0 and abs(last["mismatch/kl"]) < 1e-5, "the rollout has the newest weights"
    assert got[1] != {**got[2], "step": 1}, "a step that repeated another would be noticed"
    for model in ("actor", "critic"):
        one, other = together.weights("together", model), together.weights("apart", model)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    logs = sorted(path.name for path in (together.folder / "apart" / "logs").iterdir())
    assert logs == ["actor-rank0.log", "critic-rank0.log", "reference+reward_model-rank0.log", "rollout-rank0.log"]


def test_a_death_on_another_pool_is_named_and_nothing_is_left(apart: Started) -> None:
    """The rollout's process is killed while the actor waits for it: the error names the dead one, in time."""
    groups = apart.trainer.groups
    (victim,) = groups.rollout.workers
    groups.weights.sync(7)  # the control: alive, it takes any version
    os.kill(victim.pid, signal.SIGSTOP)
    begin = time.monotonic()
    sent = groups.actor.sync_weights.submit(8)
    assert not sent.done()
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=f"process {victim.pid} died") as died:
        groups.weights.sync(8)
    assert (died.value.role, died.value.rank) == ("rollout", 0)
    assert time.monotonic() - begin < 300
    apart.close()
    assert time.monotonic() - begin < 600


def test_a_run_goes_on_under_another_placement(together: Job) -> None:
    """Steps 1 and 2 were done in one process, step 3 is with two rollout ranks of their own."""
    resume = f"trainer.resume_from_path={together.folder / 'together' / f'global_step_{STEPS - 1}'}"
    started = Started(together.config("resumed", *ROLLOUT_APART, "trainer.resume_mode=resume_path", resume))
    started.fit()
    started.close()
    (expected,), got = together.metrics("together")[STEPS:], together.metrics("resumed")[-1]
    zero = ("mismatch/abs_diff", "mismatch/kl", "mismatch/ppl_diff")  # but for the last bits of batches of other sizes
    assert got == pytest.approx(expected | {name: got[name] for name in zero}, rel=1e-6)
    assert all(abs(metrics[name]) < 1e-4 for metrics in (got, expected) for name in zero)
    one, other = together.weights("together", "actor"), together.weights("resumed", "actor")
    assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-6) for name in one)


def test_evaluation_with_the_rollout_apart(together: Job) -> None:
    """Of the untrained policy: what step 0 of the training run reported."""
    config = together.config("evaluated", *ROLLOUT_APART)
    with ExitStack() as stack:
        run = stack.enter_context(Run(config.trainer, to_dict(config), 0))
        report = build_evaluation(config, run, stack)()
    expected = together.metrics("together")[0]
    assert report.metrics == {name: value for name, value in expected.items() if name in report.metrics}
