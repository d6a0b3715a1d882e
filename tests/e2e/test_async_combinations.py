"""Asynchronous training together with what else a job may have, several of it in each job.

Episodes that are too old do not come by chance of timing here: some wait, in the middle of their response, until the policy is
two versions newer, which is one more than the bound.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlhub.protocol import DataProto
from rlhub.trainer.ppo.offline_source import Recorded
from scripts.bench.tiny_model import build
from tests.e2e.conftest import VOCABULARY, Mains, Result, Task
from tests.support.audit import TrainedGroup, audit
from tests.support.metrics import rows_of, rows_so_far
from tests.support.reward_models import save_reward_model

STEPS, SAMPLES, BOUND = 5, 2, 1
RAY = ("trainer.backend=ray", "trainer.ray_init.num_cpus=4", "trainer.ray_init.object_store_memory=100000000")
RAY_TIMEOUT_S = 500.0
MASK, CORRECT = "trainer.stale_policy=mask", "trainer.stale_policy=correct"
AGENT = "actor_rollout_ref.rollout.agent"
WORKFLOW = """
import asyncio
from dataclasses import replace

from rlhub.agents.workflows.base import RolloutWorkflow
from rlhub.agents.trajectory import Trajectory


class Waits(RolloutWorkflow):
    async def arun_episode(self, engine, data):
        half = replace(self.parts.sampling, max_new_tokens=self.parts.max_response_length // 2, ignore_eos=True)
        first = await engine.agenerate(self.request(data), half)
        request = replace(self.request(data), prompt_ids=[*data.prompt_ids, *first.token_ids], seed=data.seed ^ 1)
        then = await engine.agenerate(request, half)
        trains = data.ordinal < 1 << 40  # validation's replica stays at its version
        if self.parts.kwargs.get("waits", True) and trains and data.ordinal % 4 == 1 and data.sample == 0:
            while then.versions[0] < first.versions[0] + 2:
                await asyncio.sleep(0.05)
                then = await engine.agenerate(request, half)
        response = [*first.token_ids, *then.token_ids]
        return Trajectory(
            prompt_ids=list(data.prompt_ids),
            response_ids=response,
            response_mask=[1] * len(response),
            rollout_log_probs=[*first.log_probs, *then.log_probs],
            versions=[*first.versions, *then.versions],
        )
"""


@pytest.fixture(scope="module")
def workflow(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("workflow") / "waits.py"
    path.write_text(WORKFLOW)
    return f"{AGENT}.default_agent_loop={path}:Waits"


def arguments(task: Task, folder: Path, workflow: str, *more: str) -> list[str]:
    """A run whose batches are recorded."""
    return task.arguments(
        folder,
        workflow,
        "actor_rollout_ref.rollout.mode=async",
        f"trainer.max_staleness={BOUND}",
        "trainer.record_batches=True",
        f"trainer.total_training_steps={STEPS}",
        "trainer.total_epochs=100",
        *more,
    )


def finished(result: Result) -> None:
    assert result.code == 0 and "Traceback" not in result.output, result.output


def batches(run: Path, steps: int = STEPS) -> list[DataProto]:
    return [whole(run / "batches" / f"step-{step:06d}.safetensors") for step in range(1, steps + 1)]


def whole(path: Path) -> DataProto:
    """A recorded batch with its tokens; behind a response stands no version."""
    batch = Recorded.read(path).whole()
    versions = batch.batch["policy_version"]
    written = torch.arange(versions.shape[1]) < batch.batch["response_length"][:, None]
    batch.batch["policy_version"] = torch.where(written, versions, -1)
    return batch


def trained_groups(run: Path, steps: int) -> list[TrainedGroup]:
    """From the recorded batches."""
    found = []
    for step, batch in enumerate(batches(run, steps), 1):
        columns = batch.batch
        tokens = [
            versions[mask.bool()].tolist()
            for versions, mask in zip(columns["policy_version"], columns["response_mask"], strict=True)
        ]
        for row in range(0, len(batch), SAMPLES):
            ordinal = int(columns["ordinal"][row])
            found.append(TrainedGroup(ordinal=ordinal, step=step, versions=tokens[row : row + SAMPLES]))
    return found


def check_once(run: Path, bound: int | None, steps: int = STEPS) -> Counter[str]:
    """Every prompt ended once at most, by the log of prompts and by the recorded batches alike; how many ended how."""
    trained = trained_groups(run, steps)
    rows = [json.loads(line) for line in (run / "prompts.jsonl").read_text().splitlines()]
    ends = {end: [row["ordinal"] for row in rows if row["end"] == end] for end in ("trained", "dropped", "rejected")}
    assert sorted(ends["trained"]) == sorted(group.ordinal for group in trained)
    ended = {row["ordinal"] for row in rows}
    drawn = max(ended) + 1
    findings = audit(
        trained=trained,
        dropped=ends["dropped"],
        rejected=ends["rejected"],
        unended=set(range(drawn)) - ended,  # what was in work when the run ended
        next_ordinal=drawn,
        scored=ended,
        bound=bound,
    )
    assert findings == []
    assert [row["step"] for row in rows_of(run) if row["step"]] == list(range(1, steps + 1))
    return Counter(row["end"] for row in rows)


def masked_for_age(run: Path, steps: int = STEPS) -> int:
    """Sampled tokens beyond the bound, none of which trains."""
    masked = 0
    for step, batch in enumerate(batches(run, steps), 1):
        versions, mask = batch.batch["policy_version"], batch.batch["response_mask"].bool()
        old = (versions >= 0) & (versions < step - 1 - BOUND)
        assert not bool((old & mask).any()), "a token beyond the bound is trained"
        assert bool(mask[(versions >= 0) & ~old].all()), "a token within the bound is masked"
        masked += int(old.sum())
    return masked


def unmask(path: Path) -> None:
    """Let every sampled token of that batch train."""
    batch = whole(path)
    batch.batch["response_mask"] = (batch.batch["policy_version"] >= 0).long()
    batch.save_to_disk(path)


def all_of(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if row["step"]]


def test_masked_and_filtered_with_replicas_and_episodes_in_processes_of_their_own(
    mains: Mains, task: Task, tmp_path: Path, workflow: str
) -> None:
    """vLLM on a pool of its own, an episode host, adaptive KL in the reward, validation beside training."""
    run, wide = tmp_path / "run", tmp_path / "model"
    build(wide, hidden=128, layers=1, vocab_size=VOCABULARY)  # narrower heads than 32 have no attention in vLLM on CPU
    more = (
        f"actor_rollout_ref.model.path={wide}",
        MASK,
        "trainer.pools.generation.n_gpus_per_node=1",
        "trainer.placement.rollout=generation",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.kv_cache_gb=0.1",
        f"{AGENT}.num_workers=1",
        "algorithm.filter_groups.enable=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100",
        f"data.val_files={task.folder / 'val.parquet'}",
        "trainer.test_freq=2",
    )
    finished(mains.start(arguments(task, run, workflow, *RAY, *more)).wait(RAY_TIMEOUT_S))
    ends, rows = check_once(run, BOUND), rows_of(run)
    assert masked_for_age(run) > 0 and sum(all_of(rows, "staleness/masked_token_share")) > 0
    assert ends["rejected"] >= sum(all_of(rows, "rollout/filtered_groups")) > 0
    for batch in batches(run):
        scores = batch.batch["scores"].view(-1, SAMPLES)
        assert bool((scores[:, 0] != scores[:, 1]).all()), "a group without signal is trained"
    coefficients = all_of(rows, "actor/reward_kl_penalty_coeff")
    assert len(set(coefficients)) == STEPS, "the coefficient follows the KL"
    assert {row["step"] for row in rows if "val/pass@1" in row} == {0, 2, 4, STEPS}
    assert all(abs(row["mismatch/kl/staleness_0"]) < 1e-5 for row in rows if "mismatch/kl/staleness_0" in row)
    unmask(run / "batches" / f"step-{STEPS:06d}.safetensors")
    for check in (masked_for_age, lambda changed: check_once(changed, BOUND)):
        with pytest.raises(AssertionError):
            check(run)


def weights(run: Path, role: str, step: int = STEPS) -> dict[str, bytes]:
    folder = run / f"global_step_{step}" / role / "huggingface"
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def mismatch_by_age(rows: Sequence[dict[str, Any]], ages: Iterable[int]) -> list[float]:
    """Who waited for a newer version may have found one newer still, so an age is not sure to be there."""
    names = [f"mismatch/kl/staleness_{age}" for age in ages]
    return [abs(row[name]) for row in rows for name in names if name in row]


def test_a_correction_changes_the_policy_of_a_critic_job_and_nothing_else(
    mains: Mains, task: Task, tmp_path: Path, workflow: str
) -> None:
    """PPO with a reward model beside the function, validation beside training, old samples corrected (decoupled: the old
    log-probs are recomputed).  Its batches give the same weights again; without the correction the critic's alone."""
    model = save_reward_model(tmp_path / "reward", task.folder / "model")
    common = (
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "critic.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "reward_model.enable=true",
        f"reward_model.model.path={model}",
    )
    correction = "algorithm.rollout_correction.rollout_is=token"
    run, again, without = (tmp_path / name for name in ("run", "again", "without"))
    validation = (f"data.val_files={task.folder / 'val.parquet'}", "trainer.test_freq=1")
    finished(mains.run(arguments(task, run, workflow, *common, CORRECT, correction, *validation)))
    assert check_once(run, None)["trained"] == STEPS * 8
    rows = rows_of(run)
    assert max(all_of(rows, "staleness/max")) > BOUND and sum(all_of(rows, "staleness/beyond_share")) > 0
    assert max(all_of(rows, "correction/weight_max")) > 1.001 and min(all_of(rows, "correction/weight_min")) < 0.999
    assert all_of(rows, "correction/weight_min")[0] == pytest.approx(1, abs=1e-5), "the first batch is of the newest version"
    assert max(mismatch_by_age(rows, range(BOUND + 1, STEPS))) > 1e-5 > max(mismatch_by_age(rows, [0]))
    assert all(row["reward/mean"] == pytest.approx(row["reward/function"] + row["reward/model"], abs=1e-4) for row in rows[1:])

    replay = ("actor_rollout_ref.rollout.mode=async", f"trainer.replay_from={run / 'batches'}", f"trainer.max_staleness={BOUND}")
    length = f"trainer.total_training_steps={STEPS}"
    finished(mains.run(task.arguments(again, *common, *replay, length, CORRECT, correction)))
    finished(mains.run(task.arguments(without, *common, *replay, length)))
    assert weights(again, "actor") == weights(run, "actor") and weights(again, "critic") == weights(run, "critic")
    assert weights(without, "critic") == weights(run, "critic")
    assert weights(without, "actor") != weights(run, "actor")


def test_remax_compares_with_a_greedy_episode_of_the_same_stream(mains: Mains, task: Task, tmp_path: Path) -> None:
    """In turns the weights are those of whole-batch generation, bit for bit; another seed's are not.  Running ahead, the greedy
    episodes are no samples."""
    common = ("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1", "trainer.total_training_steps=3")
    asynchronous = "actor_rollout_ref.rollout.mode=async"
    runs = {"whole": (), "turns": (asynchronous,), "ahead": (asynchronous, "trainer.max_staleness=2", "trainer.seed=2")}
    for name, settings in runs.items():
        finished(mains.run(task.arguments(tmp_path / name, *common, *settings)))
    found = {name: weights(tmp_path / name, "actor", 3) for name in runs}
    assert found["turns"] == found["whole"] and found["ahead"] != found["whole"]
    whole, turns, ahead = (rows_of(tmp_path / name) for name in runs)
    assert all_of(turns, "reward/greedy_mean") == all_of(whole, "reward/greedy_mean")
    assert max(all_of(ahead, "staleness/max")) <= 2 and all(0 <= mean <= 1 for mean in all_of(ahead, "reward/greedy_mean"))
    log = (tmp_path / "ahead" / "prompts.jsonl").read_text().splitlines()
    assert len({json.loads(line)["ordinal"] for line in log}) == len(log) == 24


def test_megatron_ranks_that_were_killed_go_on_with_masked_groups(
    mains: Mains, task: Task, tmp_path: Path, workflow: str
) -> None:
    """Two tensor-parallel ranks; the driver is killed in the middle, with samples in work and masked ones waiting.  By the fourth
    step some that waited are trained: the bound on what is in work leaves too few others.  Begun anew close to the end they
    would wait for versions that never come, so after the kill none does."""
    run, steps = tmp_path / "run", STEPS + 1
    more = (
        MASK,
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "trainer.save_freq=1",
        f"trainer.total_training_steps={steps}",
    )
    command = arguments(task, run, workflow, *RAY, *more)
    running = mains.start(command, hold=STEPS)
    running.until(lambda: any(row["step"] >= STEPS - 1 for row in rows_so_far(run)), "four steps", RAY_TIMEOUT_S)
    running.send(signal.SIGKILL)
    assert running.wait().code == -signal.SIGKILL
    assert running.leftovers() == []
    finished(mains.start([*command, f"{AGENT}.kwargs.waits=false"]).wait(RAY_TIMEOUT_S))
    check_once(run, BOUND, steps)
    assert masked_for_age(run, steps) > 0
