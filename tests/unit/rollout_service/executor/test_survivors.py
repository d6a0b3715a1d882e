"""Groups that lost episodes for good: which of them train, with what columns, and what a checkpoint keeps of them."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlhub.agents.trajectory import Episode, TrajectoryRef
from rlhub.agents.workflows.base import EpisodeData, EpisodeEngine
from rlhub.rollout_service.executor.batches import row_columns, to_batch
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.rollout_service.executor.executor import WorkflowExecutor
from rlhub.rollout_service.executor.ledger import Phase, PromptLedger
from rlhub.rollout_service.executor.staleness import StalenessManager
from rlhub.rollout_service.executor.statistics import EndedPrompt, logistic_slope, trained_shares
from rlhub.tracking.metrics_log import troubles
from rlhub.trainer.ppo.dealing import arrange
from scripts.checks.survivors import DEFAULT, WITHOUT, run, verdict
from tests.support.episodes import PROMPT, Immediate, executing, parts, prompts, trajectory

LIMIT_S = 60.0
HOME = "actor-0"


class Fails(Immediate):
    """Episodes of which `fails(data)` is true fail in each of their attempts."""

    def __init__(self, fails: Callable[[EpisodeData], bool]) -> None:
        super().__init__(parts())
        self.fails, self.begun = fails, list[str]()

    async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Any:
        self.begun.append(data.session)
        if self.fails(data):
            raise OSError("the tool fell over")
        return await super().arun_episode(engine, data)


def first_ones(data: EpisodeData) -> bool:
    """Of prompt k the first k episodes fail."""
    return data.sample < data.ordinal


def bound(batch: int, max_staleness: int = 0) -> StalenessManager:
    return StalenessManager(batch=batch, max_staleness=max_staleness)


def test_a_group_trains_with_the_samples_that_are_left_while_there_are_enough() -> None:
    options = {"group_size": 4, "episode_retries": 1, "min_samples": 2, "max_failed_batches": 9}
    with executing(Fails(first_ones), staleness=bound(4), **options) as executor:
        executor.start(prompts(end=4))
        groups = executor.next_groups(4, LIMIT_S)
        metrics = executor.metrics()
        ledger = executor.ledger
        assert [(group.ordinal, list(group.failed), group.places) for group in groups] == [
            (0, [], [0, 1, 2, 3]), (1, [0], [1, 2, 3]), (2, [0, 1], [2, 3]),
        ]  # fmt: skip
        assert (metrics["rollout/failed_groups"], metrics["rollout/failed_episodes"]) == (1, 1 + 2 + 3)
        assert metrics["rollout/retried_episodes"] == 1 + 2 + 3
        assert (ledger.num_retries, ledger.num_failed, dict(ledger.attempts)) == (6, 6, {1: 2, 2: 4})
        executor.set_version(1)
        assert ledger.counts == {Phase.TRAINED: 3, Phase.REJECTED: 1, Phase.DROPPED: 0} and not ledger.attempts


def test_without_the_greedy_response_there_is_nothing_to_compare_with() -> None:
    baseline = Fails(lambda data: data.ordinal == 0)
    options = {"group_size": 2, "min_samples": 1, "baseline_for": lambda row: baseline, "max_failed_batches": 9}
    with executing(Fails(lambda data: data.ordinal == 1 and data.sample == 0), staleness=bound(2), **options) as executor:
        executor.start(prompts(end=2))
        (group,) = executor.next_groups(2, LIMIT_S)
    assert group.ordinal == 1 and group.places == [1] and group.baseline is not None
    assert group.results == [None, group.trajectories[0], group.baseline]


def settled(executor: WorkflowExecutor) -> None:
    end = time.monotonic() + LIMIT_S
    while executor.metrics()["rollout/running_groups"] or executor._episodes:
        assert time.monotonic() < end
        time.sleep(0.002)


def test_a_checkpoint_keeps_what_failed_for_good() -> None:
    """In finished groups, and in those of which other episodes still run: none of them is tried again."""
    gate = asyncio.Event()

    class Waits(Fails):
        async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Any:
            if data.ordinal == 1 and data.sample == 2:
                await gate.wait()
            return await super().arun_episode(engine, data)

    options = {"group_size": 3, "episode_retries": 1, "min_samples": 1}
    ran = Waits(lambda data: data.sample == 0)
    with executing(ran, staleness=bound(2), **options) as executor:
        executor.start(prompts())
        end = time.monotonic() + LIMIT_S
        while executor.metrics()["rollout/running_groups"] != 1 or executor.ledger.num_failed < 2:
            assert time.monotonic() < end
            time.sleep(0.002)
        state = json.loads(json.dumps(executor.state()))
    assert [group["failed"] for group in state["finished"]] == [[0]]
    assert state["ledger"]["attempts"] == [[0, 2], [1, 2]] and state["ledger"]["failed_episodes"] == 2
    again = Fails(lambda data: False)
    with executing(again, staleness=bound(2), **options) as executor:
        executor.load_state(state)
        executor.start(prompts())
        groups = executor.next_groups(2, LIMIT_S)
        assert [list(group.failed) for group in groups] == [[0], [0]] and executor.ledger.attempts == {0: 2, 1: 2}
    assert again.begun == ["1-2"]
    with executing(again, staleness=bound(2), **{**options, "min_samples": 3}) as executor:  # stricter than before
        executor.load_state(state)
        executor.start(prompts())
        assert [list(group.failed) for group in executor.next_groups(2, LIMIT_S)] == [[0], []]


def test_what_a_dead_process_kept_is_generated_again_without_what_had_failed() -> None:
    class Kept(Fails):
        async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Any:
            found = await super().arun_episode(engine, data)
            return TrajectoryRef.of(found, HOME, data.session) if data.sample == 2 else found

    workflow = Kept(lambda data: data.sample == 0)
    with executing(workflow, staleness=bound(1), group_size=3, min_samples=2) as executor:
        executor.start(prompts(end=1))
        settled(executor)
        executor.runner.ask(executor.lost, HOME).result(LIMIT_S)
        settled(executor)
        (group,) = executor.next_groups(1, LIMIT_S)
    assert group.places == [1, 2] and workflow.begun == ["0-0", "0-1", "0-2", "0-2"]


def group(ordinal: int, *lengths: int | None) -> Group:
    """A group of samples of these lengths; None: it failed."""
    item = PromptItem(prompt_ids=PROMPT, ordinal=ordinal)
    failed = [place for place, length in enumerate(lengths) if length is None]
    found = [trajectory(*[0] * length) for length in lengths if length is not None]
    return Group(item=item, trajectories=found, failed=failed)


def test_a_failed_sample_has_no_row_and_keeps_its_place() -> None:
    groups = [group(0, 1, 2, 3), group(1, None, 2, None), group(2, 1, None, 1), group(3, 2, 2, 2)]
    batch = to_batch(groups, pad_id=0)
    assert len(batch) == 3 + 1 + 2 + 3
    assert batch.batch["ordinal"].tolist() == batch.batch["uid"].tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3]
    assert batch.batch["episode_id"].tolist() == [0, 1, 2, 4, 6, 8, 9, 10, 11]
    arrange(batch, rows_per_mini_batch=6, num_ranks=1, balance=True)
    assert batch.batch["mini_batch"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1], "two prompts in each, whatever has failed"
    assert "episode_id" not in row_columns([groups[0], groups[3]]), "nothing changes where nothing failed"


def test_as_many_rows_as_samples_do_not_hide_a_failure() -> None:
    """An episode of two rows stands beside one that failed."""
    item = PromptItem(prompt_ids=PROMPT, ordinal=0)
    both = Group(item=item, trajectories=[Episode(trajectories=[trajectory(0), trajectory(0)])], failed=(0,))
    assert row_columns([both])["episode_id"].tolist() == [1, 1]


def test_a_group_is_the_same_after_a_checkpoint() -> None:
    one = group(3, 1, None, 2)
    assert Group.from_json(json.loads(json.dumps(one.to_json())), one.item) == Group(
        item=one.item, trajectories=one.trajectories, failed=(1,)
    )
    old = one.to_json()
    del old["failed"]  # a checkpoint from before
    assert Group.from_json(old, one.item).places == [0, 1]


def test_a_ledger_counts_only_failures_of_what_runs() -> None:
    ledger = PromptLedger()
    ledger.issue(0)
    with pytest.raises(ValueError, match="prompt 0 has no episode that could fail: it is issued"):
        ledger.fail(0, again=True)
    ledger.run(0)
    ledger.fail(0, again=True)
    ledger.reject(0, "lost")
    assert not ledger.attempts and ledger.num_retries == 1


def likelihood(beta: torch.Tensor, x: torch.Tensor, k: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    log_odds = beta[0] + beta[1] * (x - x.mean()) / x.std(correction=0)
    prior = -0.5 * (beta[1] / 10) ** 2
    return (k * torch.nn.functional.logsigmoid(log_odds) + (n - k) * torch.nn.functional.logsigmoid(-log_odds)).sum() + prior


@pytest.mark.parametrize("seed", range(5))
def test_the_slope_is_where_the_likelihood_has_no_gradient(seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, n = rng.normal(5, 2, 200), rng.integers(2, 9, 200)
    k = rng.binomial(n, 1 / (1 + np.exp(-(2 - 0.4 * x))))
    slope, error = logistic_slope(x, k, n)
    columns = [torch.tensor(np.asarray(column), dtype=torch.float64) for column in (x, k, n)]
    beta = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS([beta], max_iter=200, tolerance_grad=1e-10)
    search.step(lambda: (search.zero_grad(), loss := -likelihood(beta, *columns), loss.backward())[1])
    assert slope == pytest.approx(beta[1].item(), abs=1e-5)
    assert abs(slope + 0.4 * x.std()) < 4 * error and 0 < error < 0.2


def test_the_slopes_error_says_how_often_chance_alone_gives_a_slope() -> None:
    """Of 400 samples without a slope about 5 in 100 are beyond 2 standard errors, also where whole groups are lost."""
    rng = np.random.default_rng(0)
    for whole in (False, True):
        beyond = 0
        for _ in range(400):
            x = rng.normal(size=150)
            k = 8 * rng.binomial(1, 0.7, 150) if whole else rng.binomial(8, 0.9, 150)
            slope, error = logistic_slope(x, k, [8] * 150)
            beyond += abs(slope) > 2 * error
        assert 4 <= beyond <= 40, whole


def test_a_slope_that_nothing_shows_has_no_bound() -> None:
    assert logistic_slope([1, 2], [4, 4], [4, 4]) == (0.0, math.inf) == logistic_slope([1, 2], [0, 0], [4, 4])
    assert logistic_slope([1, 1], [4, 3], [4, 4]) == (0.0, math.inf)
    separated, _ = logistic_slope([1, 2, 3, 4], [4, 4, 0, 0], [4] * 4)
    assert -50 < separated < -2


def test_the_share_that_trains_is_told_by_length_once_something_was_lost() -> None:
    even = [EndedPrompt(length, 8, 8) for length in (1.0, 2.0, 3.0, 4.0)]
    assert trained_shares(even) == {}
    shares = trained_shares([*even[:3], EndedPrompt(4.0, 0, 8), EndedPrompt(math.nan, 0, 8)])
    assert (shares[""], shares["_short"], shares["_long"]) == (24 / 40, 1.0, 0.5) and shares["_slope"] < 0
    assert trained_shares([EndedPrompt(math.nan, 0, 8)]) == {"": 0.0}


def test_long_episodes_that_fail_more_are_told_from_others() -> None:
    """The control is a run in which length does not matter."""

    class Long(Immediate):
        def __init__(self, grows: bool) -> None:
            super().__init__(parts())
            self.grows = grows

        async def arun_episode(self, engine: EpisodeEngine, data: EpisodeData) -> Any:
            length = 1 + data.ordinal % 8
            if random.Random(data.seed).random() < (0.04 * length if self.grows else 0.15):
                raise OSError("no")
            return trajectory(*[0] * length, prompt=data.prompt_ids)

    found = {}
    for grows in (True, False):
        with executing(Long(grows), staleness=bound(300), group_size=8, min_samples=4, max_failed_batches=9) as executor:
            executor.start(prompts(end=300))
            executor.next_groups(300, LIMIT_S)
            executor.set_version(1)
            metrics = executor.metrics()
            found[grows] = metrics["rollout/trained_share_slope"] / metrics["rollout/trained_share_slope_se"]
            assert 0.7 < metrics["rollout/trained_share"] < 0.95
            assert "trained_share" not in troubles(metrics), "a standard error is no failure"
    assert found[True] < -4 and abs(found[False]) < 3


def test_a_tenth_of_failures_loses_few_groups_and_chooses_nothing() -> None:
    """A sample of scripts/checks/survivors.py.  The control is a run without retries in the place of the defaults."""
    default, without = ([run(setting, 1, 192, 8, 0.1)] for setting in (DEFAULT, WITHOUT))
    assert verdict(default, without) and not verdict(without, without)
