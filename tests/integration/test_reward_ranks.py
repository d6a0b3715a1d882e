"""Rewards on the ranks that generated, through Ray: the same as on the driver, beside the passes, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from rlhub.algorithms.inputs import on_last_token
from rlhub.errors import RewardError, WorkerDiedError, WorkerError
from rlhub.models.tokenizer import load_tokenizer
from rlhub.protocol import Batch, BatchRef, DataProto
from rlhub.protocol.columns import object_array
from rlhub.rewards import ManagerParts, RewardResult
from rlhub.rewards.base import start_scoring
from rlhub.rewards.combine import MODEL, CombinedManager, RewardPart
from rlhub.rewards.managers import DapoKnobs, DapoManager, NaiveManager
from rlhub.rewards.pool import RewardFunction
from rlhub.single_controller import CallObserver, ClassWithInitArgs, Launched, LaunchOptions, WorkerGroup, launch
from rlhub.tracking.spans import CallTiming
from rlhub.trainer.ppo.scoring import ModelScorer, RowsOnRanks
from rlhub.utils.timing import PhaseTimer
from rlhub.workers.memory_handover import WorkerRuntime
from rlhub.workers.roles import RewardModelWorker
from tests.integration.test_reward_model import reward_config
from tests.support.chat_model import save_chat_model
from tests.support.processes import all_end
from tests.support.reward_models import plain_scores, save_reward_model
from tests.support.scoring_workers import REWARD, SAMPLES, ScoringWorker

RANKS = 2
TEXTS = ["abc", "some words", "x1"]
"""Prompts, of which the first rank gets one more; each has two responses."""
DAPO = DapoKnobs(overlong_buffer_cfg={"enable": True, "len": 6})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("scoring")
    chat = save_chat_model(found / "chat")
    save_reward_model(found / "reward", chat)
    (found / "reward.py").write_text(REWARD)
    return found


def function_of(folder: Path, name: str = "compute_score", **settings: Any) -> RewardFunction:
    return RewardFunction(target=f"{folder / 'reward.py'}:{name}", **({"num_workers": 2, "timeout_s": 120.0} | settings))


@pytest.fixture(scope="module")
def run(ray_cluster: None, folder: Path) -> Iterator[Launched]:
    runtime = WorkerRuntime(device="cpu", seed=1, max_prompt_length=8, max_response_length=24, deadline_s=600.0)
    chat = str(folder / "chat")
    roles = {
        "rollout": ClassWithInitArgs(ScoringWorker, chat, function_of(folder)),
        "unloadable": ClassWithInitArgs(ScoringWorker, chat, function_of(folder, "no_such_name")),
        "reward_model": ClassWithInitArgs(RewardModelWorker, reward_config(folder / "reward"), runtime),
        "texts": ClassWithInitArgs(RewardModelWorker, reward_config(folder / "reward", input_tokenizer=chat), runtime),
    }
    with launch(roles, LaunchOptions(backend="ray", ranks_per_node=RANKS)) as launched:
        for group in launched.groups.values():
            group.init_model()
        yield launched


def sampled(group: WorkerGroup, texts: list[str], marks: Path, *, key: str = "") -> Batch:
    """Rows as the sources give them; by reference under a key."""
    prompts = DataProto.from_dict({"ordinal": torch.arange(len(texts))}, {"text": object_array(texts)})
    method = group.sample.retain(key=key) if key else group.sample
    batch: Batch = method(prompts)
    rows = range(len(texts) * SAMPLES)
    fields = {
        "data_source": ["source"] * len(rows),
        "ground_truth": [texts[row // SAMPLES] for row in rows],
        "extra_info": [{"marks": str(marks), "row": row} for row in rows],
        "raw_chat": [f"question {row // SAMPLES}" for row in rows],
    }
    return batch.union(DataProto.from_dict({}, {name: object_array(column) for name, column in fields.items()}))


def manager_of(folder: Path, name: str, **settings: Any) -> NaiveManager:
    """A manager with a pool of its own here, which starts when it scores here."""
    policy: dict[str, Any] = {"on_error": "mask", "max_error_rate": 0.5} | settings
    tokenizer: Any = load_tokenizer(str(folder / "chat"))
    parts = ManagerParts(pool=function_of(folder).pool(), tokenizer=tokenizer, max_response_length=10, **policy)
    return DapoManager(parts, DAPO) if name == "dapo" else NaiveManager(parts)


def same(one: RewardResult, other: RewardResult) -> bool:
    columns = [{name: column.tolist() for name, column in result.extra.items()} for result in (one, other)]
    equal = torch.equal(one.scores, other.scores) and torch.equal(one.valid, other.valid)
    return equal and one.metrics == other.metrics and columns[0] == columns[1]


@pytest.mark.parametrize("key", ["", "by reference"])
@pytest.mark.parametrize("name", ["naive", "dapo", "combined", "combined-texts"])
def test_rewards_are_the_drivers(run: Launched, folder: Path, tmp_path: Path, name: str, key: str) -> None:
    """One of the rows fails, and one kills its process.  Control: the parts of the ranks in another order are noticed."""
    rollout, manager = run.groups["rollout"], manager_of(folder, name)
    texts = [*TEXTS, "raise", "die once"]  # five: by reference the first rank has two rows more than the other
    there: Any = RowsOnRanks(manager, rollout)
    here: Any = manager
    if name.startswith("combined"):
        renders, texts = name.endswith("texts"), ["even", *texts]  # the last bits of a pass depend on which rows share a rank
        model = ModelScorer(group=run.groups["texts" if renders else "reward_model"], renders=renders)
        part = RewardPart(name=MODEL, weight=0.5, start=model)
        there, here = (
            CombinedManager(function=one, function_weight=2.0, parts=[part], on_error="mask", max_error_rate=0.5)
            for one in (there, here)
        )
    (tmp_path / "died").touch()
    expected = here(sampled(rollout, texts, tmp_path))
    (tmp_path / "died").unlink()
    batch = sampled(rollout, texts, tmp_path, key=key and f"{name}-samples")
    found = there(batch)
    assert isinstance(batch, BatchRef) == bool(key) and (tmp_path / "died").exists()
    assert same(found, expected) and found.valid.tolist().count(False) == 1 and len(set(found.scores.tolist())) > 5
    take, scorer = rollout.take_outcomes, there.function if name.startswith("combined") else there
    shuffled = Reordered(rollout, take)
    scorer.group = shuffled
    assert not same(there(batch), expected)
    manager.close()
    if isinstance(batch, BatchRef):
        batch.drop()


class Reordered:
    """The rollout's ranks, whose outcomes come back in another order."""

    def __init__(self, group: WorkerGroup, take: Any) -> None:
        self.begin_scoring = group.begin_scoring
        self.take_outcomes = lambda key: take(key)[::-1]


def test_a_reward_models_scores_are_those_of_transformers(run: Launched, folder: Path, tmp_path: Path) -> None:
    batch = sampled(run.groups["rollout"], TEXTS, tmp_path)
    tokenizer = load_tokenizer(str(folder / "chat"))
    rows = [[7, *tokenizer(text[: len(text) - cut])["input_ids"]] for text in TEXTS for cut in range(SAMPLES)]
    found = ModelScorer(group=run.groups["reward_model"], renders=False)(batch)()
    assert [one.score for one in found.outcomes] == pytest.approx(plain_scores(folder / "reward", rows), abs=1e-5)


@pytest.mark.parametrize("key", ["", "beside"])
def test_rewards_run_beside_the_passes(run: Launched, folder: Path, tmp_path: Path, key: str) -> None:
    """Each waits for the other: the pass for the rewards' start, the rewards for the end of both ranks' passes."""
    rollout = run.groups["rollout"]
    batch = sampled(rollout, ["wait", "wait"], tmp_path, key=key)
    pending = RowsOnRanks(manager_of(folder, "naive"), rollout).start(batch)
    assert not list(tmp_path.glob("passed-*"))
    passed = rollout.compute_log_prob.submit(batch.select(["response_length"], []), str(tmp_path))
    assert passed.get().batch["rank"].tolist() == [0, 0, 1, 1]
    assert pending().valid.all() and len(list(tmp_path.glob("began-*"))) == 2


def test_the_policy_for_failures_is_the_drivers(run: Launched, folder: Path, tmp_path: Path) -> None:
    rollout = run.groups["rollout"]
    batch = sampled(rollout, ["raise", "raise", "ok"], tmp_path)
    strict = RowsOnRanks(manager_of(folder, "naive", max_error_rate=0.3), rollout)
    with pytest.raises(RewardError, match=r"(?s)2 of 6 samples \(2 raised\)\nrow 0, data_source 'source', 5 tokens.*0.3 allows"):
        strict(batch)
    stops = RowsOnRanks(manager_of(folder, "naive", on_error="fail"), rollout)
    with pytest.raises(RewardError, match=r"(?s)cannot judge this.*on_error=fail"):
        stops(batch)
    assert RowsOnRanks(manager_of(folder, "naive"), rollout)(batch).metrics["reward/num_failed"] == 2.0


def test_a_function_that_a_rank_cannot_load_is_named_with_the_rank(run: Launched, folder: Path, tmp_path: Path) -> None:
    group = run.groups["unloadable"]
    with pytest.raises(WorkerError, match=r"(?s)cannot load .*reward.py:no_such_name") as failed:
        RowsOnRanks(manager_of(folder, "naive"), group)(sampled(group, TEXTS, tmp_path))
    assert failed.value.role == "unloadable" and failed.value.remote_type == "LoadError"


def test_a_prompts_fields_travel_once_for_its_samples(run: Launched, folder: Path, tmp_path: Path) -> None:
    """By reference no token does, and outcomes are a few bytes."""
    rollout, timing = run.groups["rollout"], CallTiming(PhaseTimer())
    batch = sampled(rollout, ["a long response here"] * 64, tmp_path, key="counted")
    same_info = {"marks": str(tmp_path), "text": "x" * 1000}
    batch.non_tensor_batch["extra_info"][:] = same_info
    observer: CallObserver = timing
    rollout.observers.append(observer)
    RowsOnRanks(manager_of(folder, "naive"), rollout)(batch)
    rollout.observers.remove(observer)
    traffic = timing.traffic()
    assert RANKS * 1000 < traffic["perf/driver_bytes_prompts"] < RANKS * 1500 + 50 * len(batch)
    assert traffic["perf/driver_bytes_out"] - traffic["perf/driver_bytes_prompts"] < 100
    assert 0 < traffic["perf/driver_bytes_in"] <= 20 * len(batch)
    assert isinstance(batch, BatchRef)
    batch.drop()


class ReadsTokens(NaiveManager):
    """Scores tokens: half of the score on the first, half on the last."""

    def __call__(self, batch: DataProto) -> RewardResult:
        result = super().__call__(batch)
        result.token_level_scores = on_last_token(result.scores / 2, batch.batch["response_mask"])
        result.token_level_scores[:, 0] += result.scores / 2
        return result


def test_a_manager_that_reads_tokens_is_brought_the_rows_and_their_bytes_are_counted(
    run: Launched, folder: Path, tmp_path: Path
) -> None:
    rollout, manager = run.groups["rollout"], ReadsTokens(manager_of(folder, "naive").parts)
    batch, before = sampled(rollout, TEXTS, tmp_path, key="read"), rollout.fetched_bytes
    found = start_scoring(manager, batch)()
    manager.close()
    assert isinstance(batch, BatchRef) and found.token_level_scores is not None
    assert torch.allclose(found.token_level_scores.sum(1), found.scores) and bool((found.token_level_scores[:, 0] > 0).all())
    assert rollout.fetched_bytes - before > 5 * int(batch.batch["response_length"].sum())
    batch.drop()


def test_a_killed_rank_is_named_and_its_processes_end(ray_cluster: None, folder: Path, tmp_path: Path) -> None:
    roles = {"rollout": ClassWithInitArgs(ScoringWorker, str(folder / "chat"), function_of(folder))}
    with launch(roles, LaunchOptions(backend="ray", ranks_per_node=RANKS)) as launched:
        rollout = launched.groups["rollout"]
        rollout.init_model()
        pending = RowsOnRanks(manager_of(folder, "naive"), rollout).start(sampled(rollout, ["hang", "hang"], tmp_path))
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("hangs-*"))) < RANKS:
            assert time.monotonic() < deadline, "the function does not hang"
            time.sleep(0.01)
        children = [child.pid for worker in rollout.workers for child in psutil.Process(worker.pid).children(recursive=True)]
        assert len(children) >= 2 * RANKS
        os.kill(rollout.workers[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError) as died:
            pending()
        assert (died.value.role, died.value.rank) == ("rollout", 1)
    assert all_end(children), "of the killed rank, and of the other, which was closed while its function hangs"
