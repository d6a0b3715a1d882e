"""An action policy trained in simulators by main_ppo: the same bits however it runs, and what a killed process costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from recipes.tiny_smolvlm import write_model
from rlhub.config.cli import prepare
from rlhub.config.sections.env import EnvConfig
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.vla import vla_of
from rlhub.engines.rollout.base import SamplingParams
from rlhub.engines.rollout.embodied import EpisodeRunner, PolicyCall, starts_of
from rlhub.errors import WorkerDiedError
from rlhub.models.tokenizer import load_tokenizer
from rlhub.protocol import DataProto
from rlhub.trainer.launch import launch_ranks
from rlhub.trainer.main_ppo import fit
from rlhub.trainer.ppo.embodied import SUCCESSES
from rlhub.trainer.preflight.checks import check
from tests.integration.test_placement import STEPS, VARYING, Started
from tests.support import vla
from tests.support.metrics import rows_of, rows_so_far
from tests.support.processes import all_end

if find_spec("mujoco") is None:
    pytest.skip("the extra 'envs' is not installed: bash scripts/setup_env.sh", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
ON_RANKS = ("trainer.backend=ray", "trainer.n_gpus_per_node=2")
SCENES = 8
EASY = '''
from rlhub.envs.vector import reach_color

reach_color.RADIUS = 0.8


class Easy(reach_color.ReachColor):
    """Random actions succeed now and then."""
'''
MORTAL = '''
import os
import signal

from rlhub.envs.vector.reach_color import ReachColor


class Mortal(ReachColor):
    """Its process is killed once, in the midst of an episode, by whichever process is the first to come so far."""

    steps = 0

    def __init__(self, mark):
        super().__init__()
        self.mark = mark

    def step(self, action):
        Mortal.steps += 1
        if Mortal.steps == 9 and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)
'''


@dataclass(slots=True, kw_only=True)
class Job:
    """Overrides for a run in `folder`, with a model of its own."""

    folder: Path

    def overrides(self, name: str, *more: str) -> list[str]:
        settings = ", ".join(f"{key}: {value}".replace("True", "true") for key, value in vla.settings().items())
        actor = "actor_rollout_ref.actor"
        return [
            "env.name=reach_color",
            "env.val_scenes=4",
            f"actor_rollout_ref.model.path={self.folder / 'model'}",
            f"actor_rollout_ref.model.vla={{{settings}}}",
            "actor_rollout_ref.rollout.name=hf",
            f"data.train_batch_size={SCENES}",
            "data.max_prompt_length=16",
            f"data.max_response_length={vla.TOKENS}",
            "algorithm.adv_estimator=chunk_gae",
            f"{actor}.ppo_mini_batch_size={SCENES // 2}",
            f"{actor}.ppo_epochs=2",
            f"{actor}.log_prob_level=chunk",
            f"{actor}.value_loss_coef=0.5",
            f"{actor}.target_kl=0.04",
            f"{actor}.shuffle=true",
            f"{actor}.optim.lr=1e-3",
            "trainer.device=cpu",
            "trainer.backend=local",
            f"trainer.total_training_steps={STEPS}",
            "trainer.save_freq=1",
            "trainer.test_freq=3",
            "trainer.logger=[]",
            f"trainer.default_local_dir={self.folder / name}",
            *more,
        ]

    def config(self, name: str, *more: str) -> PPOConfig:
        return prepare(PPOConfig, "ppo", self.overrides(name, *more), preflight=check)

    def left_rows(self, name: str) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if not key.startswith(VARYING)} for row in rows_of(self.folder / name)]

    def left(self, name: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
        """The metrics of a run that do not vary, and its weights and optimizer states."""
        rows = self.left_rows(name)
        files = (self.folder / name / f"global_step_{STEPS}").rglob("shards*.safetensors")
        return rows, {f"{file.name} {key}": value for file in sorted(files) for key, value in load_file(file).items()}


def assert_same(job: Job, one: str, other: str) -> None:
    (rows, weights), (rows_2, weights_2) = job.left(one), job.left(other)
    assert rows == rows_2 and [row["step"] for row in rows] == list(range(STEPS + 1))
    assert weights.keys() == weights_2.keys() and all(torch.equal(weights[name], weights_2[name]) for name in weights)
    assert rows[1]["actor/grad_norm"] != rows[2]["actor/grad_norm"] and {"rollout/success", "val/success"} <= rows[STEPS].keys()


def simulators(pids: Sequence[int]) -> set[int]:
    """The processes below these."""
    return {child.pid for pid in pids for child in psutil.Process(pid).children(recursive=True)}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("embodied")
    write_model(folder / "model", 1, ("touch", "red", "blue"), num_places=vla.TOKENS, num_bins=vla.BINS)
    (folder / "mortal.py").write_text(MORTAL)
    (folder / "easy.py").write_text(EASY)
    return Job(folder=folder)


@pytest.fixture(scope="module")
def alone(job: Job) -> Job:
    """A run in this process, with which others are compared."""
    assert fit(job.config("alone")) == 0
    return job


def test_the_graph_trains_as_the_plain_step_does(alone: Job) -> None:
    assert fit(alone.config("graph", "trainer.pipeline=ppo")) == 0
    assert_same(alone, "alone", "graph")


def test_stages_and_environments_change_no_episode(alone: Job) -> None:
    """Tokens and rewards of real episodes, by the real engine: all at once, in waves, and in two stages."""
    model = vla.model_config(alone.folder / "model")
    settings = vla_of(model)
    assert settings is not None
    scenes = torch.arange(6)
    starts = starts_of({"uid": scenes, "ordinal": scenes, "seed": scenes + 5, "initial": scenes * 0 - 1}, samples=2, run_seed=3)
    engine, found = vla.rollout_engine(model), []
    for num_envs, stages in ((12, 1), (12, 2), (5, 2)):
        config = EnvConfig(name="reach_color", num_envs=num_envs, stages=stages)
        runner = EpisodeRunner(engine, config, settings, load_tokenizer(model.path))
        try:
            found.append(runner.run(starts, SamplingParams(max_new_tokens=vla.TOKENS)))
        finally:
            runner.close()
    assert len(found[0]) > 20 and facts(found[0]) == facts(found[1]) == facts(found[2])
    for call, other in zip(found[0], found[1], strict=True):
        assert call.completion.log_probs == pytest.approx(other.completion.log_probs, abs=1e-6)


def facts(calls: Sequence[PolicyCall]) -> list[tuple[Any, ...]]:
    return [
        (call.start, call.number, call.completion.token_ids, call.reward, call.executed, call.terminated, call.images.tolist())
        for call in calls
    ]


def test_a_killed_driver_resumes_to_the_same_weights(alone: Job) -> None:
    folder = alone.folder / "resumed"
    command = [sys.executable, "-m", "rlhub.trainer.main_ppo", *alone.overrides("resumed")]
    with (alone.folder / "log").open("w") as log:
        driver = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        deadline = time.monotonic() + 600
        while not [row for row in rows_so_far(folder) if row["step"] == 1] and driver.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        below = simulators([driver.pid]) if driver.poll() is None else set()
        driver.kill()
        assert driver.wait() == -signal.SIGKILL, (alone.folder / "log").read_text()[-3000:]
    assert below and all_end(below), "the simulators end with their driver"
    assert fit(alone.config("resumed")) == 0
    assert_same(alone, "alone", "resumed")


# --- failures that are compared with successes ---------------------------------------------------------------------------------


def self_referential(job: Job, *more: str) -> tuple[str, ...]:
    own = ("env.reward=srpo", "env.srpo.task=instruction", "env.num_scenes=64", f"env.name={job.folder / 'easy.py'}:Easy")
    return *own, "actor_rollout_ref.rollout.n=2", *more


def successes(job: Job, name: str, step: int) -> dict[str, torch.Tensor]:
    return load_file(job.folder / name / f"global_step_{step}" / SUCCESSES)


@pytest.fixture(scope="module")
def compared(job: Job) -> Job:
    assert fit(job.config("srpo", *self_referential(job))) == 0
    return job


def test_failures_are_rewarded_alike_on_any_ranks(ray_cluster: None, compared: Job) -> None:
    """The first step has the same weights everywhere; two ranks train alike with rows by reference, with the driver's, and where
    every rank runs the loop."""
    job = compared
    for name, more in (("srpo-reference", ()), ("srpo-driver", ("trainer.batches=driver",))):
        started = Started(job.config(name, *self_referential(job, *ON_RANKS, *more)))
        started.fit()
        started.close()
    assert launch_ranks(job.config("srpo-everywhere", *self_referential(job, *ON_RANKS, "trainer.controller=multi")), fit) == 0
    for name in ("srpo-driver", "srpo-everywhere"):
        assert_same(job, "srpo-reference", name)
    one, two = (job.left(name)[0] for name in ("srpo", "srpo-reference"))
    solved, outcome = one[1]["rollout/success"], one[1]["rollout/return"]
    assert outcome == two[1]["rollout/return"] and 0 < solved < outcome < solved + 0.6 * (1 - solved), "failures have rewards"
    for name in ("srpo-reference", "srpo-driver", "srpo-everywhere"):
        found, other = successes(job, "srpo", 1), successes(job, name, 1)
        assert found.keys() == other.keys() and all(torch.equal(found[key], other[key]) for key in found) and len(found["task"])


def test_a_resumed_run_compares_with_the_successes_before_it(compared: Job) -> None:
    job = compared
    assert fit(job.config("srpo-resumed", *self_referential(job, "trainer.total_training_steps=2"))) == 0
    assert fit(job.config("srpo-resumed", *self_referential(job))) == 0
    assert fit(job.config("srpo-forgetful", *self_referential(job, "env.srpo.bank=0"))) == 0
    (rows, weights), (again, same), (forgetful, _) = (job.left(f"srpo{name}") for name in ("", "-resumed", "-forgetful"))
    assert rows[STEPS] == again[-1] and all(torch.equal(weights[name], same[name]) for name in weights)
    assert len(successes(job, "srpo-resumed", STEPS)["task"]) > len(successes(job, "srpo-resumed", 1)["task"])
    assert rows[1] == forgetful[1] and rows[2]["rollout/return"] != forgetful[2]["rollout/return"], "the bank has an effect"


def test_episodes_are_compared_in_features_of_a_video_model(job: Job) -> None:
    video = vla.write_video_model(job.folder / "video")
    encoder = ("env.srpo.encoder=vjepa2", f"env.srpo.path={video}", "trainer.total_training_steps=1")
    assert fit(job.config("srpo-video", *self_referential(job, *encoder))) == 0
    row = job.left_rows("srpo-video")[1]
    assert row["rollout/return"] > row["rollout/success"] > 0 and successes(job, "srpo-video", 1)["embeddings"].shape[1] == 32


@pytest.fixture(scope="module")
def by_reference(ray_cluster: None, job: Job) -> Job:
    started = Started(job.config("reference", *ON_RANKS))
    started.fit()
    started.close()
    return job


def test_batches_by_reference_are_those_of_the_driver_and_a_killed_rank_is_named(by_reference: Job) -> None:
    """Two ranks, bit for bit.  Then one of them is killed in the midst of its episodes."""
    started = Started(by_reference.config("driver", *ON_RANKS, "trainer.batches=driver"))
    try:
        started.fit()
        assert_same(by_reference, "reference", "driver")
        below = simulators(sorted(started.pids))
        assert len(below) >= 2
        group = started.trainer.groups.rollout
        victim = group.workers[1]
        sent = group.run_episodes.submit(asked())
        os.kill(victim.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=f"process {victim.pid} died") as died:
            sent.get()
        assert (died.value.role, died.value.rank) == ("actor_rollout_ref", 1)
    finally:
        started.close()
    assert all_end(below), "simulators of a killed rank end too"


def asked() -> DataProto:
    """More episodes than end at once."""
    scenes = torch.arange(4000)
    request = DataProto.from_dict({"uid": scenes, "ordinal": scenes, "seed": scenes, "initial": scenes * 0 - 1})
    request.meta_info.update(n=1, temperature=1.0, top_p=1.0, top_k=-1, log_probs=True)
    return request


def test_a_killed_simulator_costs_its_episodes_and_the_run_goes_on(ray_cluster: None, job: Job) -> None:
    mark = job.folder / "mark"
    own = (f"env.name={job.folder / 'mortal.py'}:Mortal", f"env.settings={{mark: {mark}}}", "env.manager={processes: 2}")
    started = Started(job.config("mortal", *ON_RANKS, *own))
    started.fit()
    below = simulators(sorted(started.pids))
    started.close()
    assert mark.exists() and all_end(below)
    rows = rows_of(job.folder / "mortal")
    lost = [row["rollout/lost_episodes"] + row.get("val/lost_episodes", 0) for row in rows if row["step"]]
    lost[0] += rows[0].get("val/lost_episodes", 0)
    assert lost[0] >= 1 and lost[1:] == [0] * (STEPS - 1), "a process had two or four episodes"
    assert all(row["actor/optimizer_steps"] > 0 for row in rows if row["step"])
