"""Every rank runs the loop: as under one driver, bit for bit, with and without Ray, and no rank outlives another's death."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhub.config.cli import prepare
from rlhub.config.sections.ppo import PPOConfig
from rlhub.single_controller import ObservedCall
from rlhub.tracking.metrics_log import read_metrics
from rlhub.trainer.launch import launch_ranks
from rlhub.trainer.main_ppo import fit
from scripts.bench.tiny_model import build
from scripts.checks.jobs import ROOT, STEPS, VOCABULARY, Task
from tests.support.every_rank import POOLS, RANKS, start_ranks
from tests.support.reward_models import save_reward_model


def test_batches_by_reference_are_those_of_one_driver(tmp_path: Path) -> None:
    """The same checks as through Ray, in five processes of three pools of which each runs its own share."""
    size = RANKS + sum(sum(counts) for counts in POOLS.values())
    ranks = start_ranks(size, "-m", "tests.support.every_rank", log=tmp_path / "log")
    codes = [rank.wait(600) for rank in ranks]
    assert codes == [0] * size, "\n".join((tmp_path / f"log.{rank}").read_text()[-3000:] for rank in range(size))


def test_one_driver_every_rank_and_torchrun_give_the_same_bits_and_a_killed_rank_ends_all() -> None:
    """The sample of the program: its controls must differ, and the run resumes to the same weights."""
    command = [sys.executable, str(ROOT / "scripts/checks/every_rank.py"), "--only=grpo", "--ranks=2", "--kills=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 7 and "control: gather order permuted" in done.stdout, done.stdout


class Calls:
    """Observes calls."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []

    def on_start(self, call: ObservedCall) -> None:
        self.started.append((call.method, len(call.workers)))

    def on_end(self, call: ObservedCall, seconds: float, error: BaseException | None) -> None: ...

    def on_transfer(self, call: ObservedCall, *, sent: int = 0, received: int = 0) -> None: ...


def test_the_launcher_makes_one_call_a_rank(ray_cluster: None, tmp_path: Path) -> None:
    """After it has asked where the ranks meet; all steps of the run lie between the call and its result."""
    run, calls = tmp_path / "run", Calls()
    more = ("trainer.backend=ray", "trainer.controller=multi", "trainer.n_gpus_per_node=2", "trainer.record_batches=False")
    task = Task(folder=tmp_path / "task", seconds=0.0).write()
    config = prepare(PPOConfig, "ppo", task.arguments(run, *more, deadline_s=600.0))
    assert launch_ranks(config, fit, [calls]) == 0
    assert calls.started == [("address", 1), ("train", 2)]
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == list(range(1, STEPS + 1))


VLLM = ("actor_rollout_ref.rollout.name=vllm", "algorithm.rollout_correction.mismatch_stop=0.01")
REWARD_MODEL = ("reward_model.enable=true", "reward_model.function_weight=0")


@pytest.mark.parametrize("settings", [VLLM, REWARD_MODEL], ids=["vllm", "reward_model"])
def test_other_engines_and_learned_rewards_are_those_of_one_driver(
    ray_cluster: None, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    """Two steps, so that the engine has weights that were trained; the bits of the weights and the rewards are the same."""
    task = Task(folder=tmp_path / "task", seconds=0.0).write()
    build(task.folder / "model", hidden=128, layers=2, vocab_size=VOCABULARY)  # vLLM has no kernels for smaller heads
    if settings is REWARD_MODEL:
        settings += (f"reward_model.model.path={save_reward_model(tmp_path / 'reward', task.folder / 'model')}",)
    settings += ("trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.record_batches=False")
    settings += ("trainer.total_training_steps=2", "trainer.save_freq=2")
    found = {}
    for controller, run in (("single", lambda config: fit(config)), ("multi", lambda config: launch_ranks(config, fit))):
        folder = tmp_path / controller
        arguments = task.arguments(folder, *settings, f"trainer.controller={controller}", deadline_s=600.0)
        assert run(prepare(PPOConfig, "ppo", arguments)) == 0
        weights = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}
        rows = read_metrics(folder / "metrics.jsonl")
        found[controller] = weights, [(row["step"], row["actor/grad_norm"], row["critic/score/mean"]) for row in rows]
    assert found["single"][0] and [step for step, *_ in found["single"][1]] == [1, 2]
    assert found["single"] == found["multi"]
