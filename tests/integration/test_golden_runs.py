"""Recorded runs: in process and through Ray a job gives the same bits, and the comparison notices what differs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.golden_runs import Outcome, differences

ROOT = Path(__file__).resolve().parents[2]
TWO = "--only=grpo,whiten_rewards"
"""Without and with a critic."""
GRAPHS = f"{TWO},replayed,collected,episodes"
SECOND = """
from rlhub.pipeline.builtin import DEALT, ppo
from rlhub.workers.actor import ReferenceWorker


class Second(ReferenceWorker):
    def __init__(self, config, runtime):
        super().__init__(config.actor_rollout_ref, runtime)


def pipeline(config, needs):
    step = ppo(config, needs)
    step.roles = {"second": f"{__file__}:Second"}
    own = {"run": "compute_ref_log_prob", "on": "second", "reads": DEALT, "writes": "ref_log_prob"}
    return step.replace("compute_ref_log_prob", "second_log_prob", **own)
"""
"""The reference as a role of the pipeline's own, with a class of the user's file."""


def golden_runs(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "golden_runs.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("golden"))
    done = golden_runs("record", "--out", folder, "--backend=local", f"{GRAPHS},kl_loss")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_in_process_and_through_ray_a_job_gives_the_same_bits(record: str) -> None:
    compared = golden_runs("compare", "--with", record, "--backend=ray", "--against=local", TWO)
    assert compared.returncode == 0 and compared.stdout.count("the same") == 2, compared.stdout + compared.stderr


def test_as_a_graph_a_step_gives_the_same_bits(record: str) -> None:
    """Batches that come from files too, and episodes in simulators."""
    compared = golden_runs("compare", "--with", record, "--backend=local", GRAPHS, "--set", "trainer.pipeline=ppo")
    assert compared.returncode == 0 and compared.stdout.count("the same") == 5, compared.stdout + compared.stderr


def test_a_role_of_a_pipelines_own_on_a_pool_of_its_own_gives_the_same_bits(record: str, tmp_path: Path) -> None:
    (tmp_path / "second.py").write_text(SECOND)
    pool = ["trainer.pools.other.n_gpus_per_node=1", "trainer.placement.second=other"]
    settings = ["--set", f"trainer.pipeline={tmp_path / 'second.py'}:pipeline", *pool]
    compared = golden_runs("compare", "--with", record, "--backend=ray", "--against=local", "--only=kl_loss", *settings)
    assert compared.returncode == 0, compared.stdout + compared.stderr


def test_a_users_pipeline_trains_through_ray_from_its_path(tmp_path: Path) -> None:
    """On two ranks, with batches by reference; the file has a second scorer, a shaping node and advantages of its own.  Shaping
    takes so long that the rows have moved to the ranks that train before it ends."""
    written = (ROOT / "recipes" / "pipelines" / "brevity.py").read_text()
    assert len(written.splitlines()) <= 40
    pipeline, computed = tmp_path / "slow.py", '    shaped = batch.batch["scores"]'
    assert computed in written
    pipeline.write_text(written.replace(computed, f"    __import__('time').sleep(3)\n{computed}"))
    settings = [f"trainer.pipeline={pipeline}:pipeline", "trainer.n_gpus_per_node=2"]
    done = golden_runs("record", "--out", str(tmp_path), "--backend=ray", "--only=grpo", "--set", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = Outcome.load(tmp_path / "grpo" / "ray")
    assert len(trained.metrics) == 3
    for row in trained.metrics:
        assert row["critic/shaped/mean"] > 0 and row["actor/grad_norm"] > 0
        assert {"reward/mean", "response_length/mean", "mismatch/kl"} <= row.keys(), "measured beside advantages of one's own"
        assert {"perf/node_s/brevity", "perf/node_s/shape", "perf/node_s/advantages"} <= row.keys()


def test_another_seed_is_noticed(record: str) -> None:
    """Control of the test above."""
    compared = golden_runs("compare", "--with", record, "--backend=local", "--only=grpo", "--set", "trainer.seed=2", "--all")
    assert compared.returncode == 1, compared.stdout + compared.stderr
    lines = compared.stdout
    assert "grpo (local): DIFFERENT" in lines and "metric actor/pg_loss: " in lines and "first in step 1" in lines
    assert "tensor actor/huggingface/model.safetensors:model.embed_tokens.weight: " in lines and "elements differ, by" in lines


def test_a_run_that_fails_is_no_match(record: str) -> None:
    compared = golden_runs("compare", "--with", record, "--backend=local", "--only=grpo", "--set", "data.no_such_key=1")
    assert compared.returncode == 1 and "no_such_key" in compared.stdout, compared.stdout + compared.stderr


def test_an_unknown_configuration_is_refused() -> None:
    refused = golden_runs("compare", "--with", "nowhere", "--only=grp")
    assert refused.returncode == 2 and "no configuration grp; known: grpo, gae" in refused.stderr


def outcome(weight: float = 1.0, **metrics: Any) -> Outcome:
    return Outcome(metrics=[{"step": 1, **metrics}], tensors={"actor:weight": torch.tensor([weight, 2.0])})


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (outcome(loss=0.5), []),
        (outcome(loss=0.5, **{"timing_s/step": 1.0}), []),
        (outcome(loss=0.5000000000000001), ["metric loss: 0.5 recorded, 0.5000000000000001 now (by 1.11e-16), first in step 1"]),
        (outcome(), ["metric loss: 0.5 recorded, None now, first in step 1"]),
        (outcome(1.0 + 2**-23, loss=0.5), ["tensor actor:weight: 1 of 2 elements differ, by 1.19e-07 at most"]),
    ],
)
def test_the_last_bit_counts(present: Outcome, expected: list[str]) -> None:
    assert differences(outcome(loss=0.5), present) == expected


def test_metrics_left_out_are_not_compared() -> None:
    assert differences(outcome(loss=0.5), outcome(loss=0.6), ["lo*"]) == []


def test_a_record_on_disk_is_the_outcome(tmp_path: Path) -> None:
    outcome(loss=0.1).save(tmp_path)
    assert differences(outcome(loss=0.1), Outcome.load(tmp_path)) == []
