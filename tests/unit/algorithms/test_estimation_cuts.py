"""However a batch is cut over processes, advantages, masks, weights and selected tokens are the same in every bit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhub.algorithms.estimation import ColumnOutputs, compute_advantages, measure_batch, rollout_correction, select_tokens
from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from rlhub.algorithms.statistics import Gather
from rlhub.config.sections.actor import ActorConfig, PolicyLossConfig
from rlhub.config.sections.algorithm import AlgorithmConfig
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from rlhub.errors import ProtocolError, RewardError
from rlhub.registry import Row
from tests.unit.algorithms.estimation_cases import KNOBS, VERSION, Columns, cut, make_batch

Work = Callable[[Columns, Gather], ColumnOutputs]


def by_batch_mean(inputs: AdvantageInputs, knobs: None) -> AdvantageOutputs:
    """An estimator as a user writes it: the rows that it is given are the batch."""
    rewards = inputs.outcome_rewards()
    advantages = inputs.on_tokens(rewards - rewards.mean())
    return AdvantageOutputs(advantages=advantages, returns=advantages, metrics={"mine/mean": rewards.mean().item()})


ROWS_OF_USERS = {
    "mine": Row(name="mine", target=by_batch_mean),
    "mine_that_gathers": Row(name="mine_that_gathers", target=by_batch_mean, requires=frozenset({"gather"})),
}
ESTIMATORS = [name for name in ADVANTAGE_ESTIMATORS.names() if name not in ROWS_OF_USERS] + ["mine"]


@pytest.fixture(autouse=True)
def estimators_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in ROWS_OF_USERS.items():
        monkeypatch.setitem(ADVANTAGE_ESTIMATORS._rows, name, row)


class Exchange:
    """The collective of ranks that are threads of this process."""

    def __init__(self, num_ranks: int, sorts: bool = True) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * num_ranks
        self.barrier, self.sorts = threading.Barrier(num_ranks, timeout=60), sorts

    def collect(self, rank: int, rows: Tensor) -> Tensor:
        self.parts[rank] = rows
        self.barrier.wait()
        every = list(self.parts)
        self.barrier.wait()
        if rows.dim() > 1:
            width = max(part.shape[1] for part in every)
            every = [torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in every]
        return torch.cat(every)

    def gather(self, rank: int, sample_index: Tensor) -> Gather:
        gather = Gather.of(sample_index, partial(self.collect, rank))
        if self.sorts:
            return gather
        every = self.collect(rank, sample_index)
        places = (every[:, None] == sample_index).nonzero()[:, 0]
        return Gather(torch.arange(len(every)), places, gather.collect)


def on_ranks(work: Work, parts: list[dict[str, Tensor]], *, sorts: bool = True) -> list[Any]:
    """What each rank has of it: its outputs, or the error."""
    exchange = Exchange(len(parts), sorts)

    def run(rank: int) -> Any:
        try:
            return work(parts[rank], exchange.gather(rank, parts[rank]["sample_index"]))
        except (ProtocolError, RewardError) as error:
            return error

    with ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(run, range(len(parts))))


def check_cut(work: Work, columns: Columns, width: int, ranks: list[Tensor], *, sorts: bool = True) -> None:
    """Columns bit by bit on every row's tokens, 0 behind them; metrics bit by bit on every rank."""
    whole = work(columns, Gather.of(columns["sample_index"]))
    for rows, found in zip(ranks, on_ranks(work, cut(columns, width, ranks), sorts=sorts), strict=True):
        assert not isinstance(found, Exception), found
        assert found.metrics == pytest.approx(whole.metrics, rel=0, abs=0, nan_ok=True)
        assert found.columns.keys() == whole.columns.keys()
        for name, column in found.columns.items():
            expected = whole.columns[name][rows]
            assert column.dtype == expected.dtype and torch.equal(column, expected[:, : column.shape[1]]), name
            assert not expected[:, column.shape[1] :].any()


@st.composite
def cuts(draw: st.DrawFn) -> tuple[dict[str, Tensor], int, list[Tensor]]:
    num_rows, width = draw(st.integers(1, 14)), draw(st.integers(1, 11))
    rank = torch.tensor(draw(st.lists(st.integers(0, draw(st.integers(0, 4))), min_size=num_rows, max_size=num_rows)))
    seed = draw(st.integers(0, 2**31))
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    ranks = [order[rank[order] == number] for number in range(int(rank.max()) + 1)]
    return make_batch(seed, num_rows, width), width, ranks


few = settings(max_examples=12, deadline=None)


def advantages_of(name: str, **changes: Any) -> Work:
    algorithm = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8, **changes)
    return partial(compute_advantages, algorithm=algorithm, kl_coef=0.3, version=VERSION, mask_truncated=True)


@pytest.mark.parametrize("name", ESTIMATORS)
@few
@given(case=cuts(), in_reward=st.booleans(), whitened=st.booleans())
def test_every_estimator(name: str, case: Any, in_reward: bool, whitened: bool) -> None:
    check_cut(advantages_of(name, use_kl_in_reward=in_reward, whiten_rewards=whitened), *case)


@pytest.mark.parametrize("name", ["grpo", "gae", "reinforce_plus_plus"])
@few
@given(case=cuts(), in_reward=st.booleans())
def test_a_batch_is_measured_as_beside_the_advantages(name: str, case: Any, in_reward: bool) -> None:
    """However it is cut; only what the estimator itself reports is missing."""
    columns, width, ranks = case
    algorithm = AlgorithmConfig(adv_estimator=name, use_kl_in_reward=in_reward)
    gather = Gather.of(columns["sample_index"])
    beside = compute_advantages(columns, gather, algorithm, kl_coef=0.3, version=VERSION)
    columns |= beside.columns

    def work(part: Columns, of_part: Gather) -> ColumnOutputs:
        return ColumnOutputs(columns={}, metrics=measure_batch(part, of_part, algorithm, kl_coef=0.3, version=VERSION))

    alone = work(columns, gather).metrics
    assert alone == pytest.approx({name: beside.metrics[name] for name in alone}, rel=0, abs=0, nan_ok=True)
    assert {"reward/mean", "response_length/mean", "mismatch/kl"} & beside.metrics.keys() <= alone.keys()
    assert ("actor/reward_kl_penalty" in alone) == in_reward
    check_cut(work, columns, width, ranks)


def test_a_batch_without_scores_is_measured_too() -> None:
    columns = {name: column for name, column in make_batch(1, 6, 5).items() if name not in ("scores", "valid", "ref_log_prob")}
    algorithm = AlgorithmConfig(use_kl_in_reward=True)
    found = measure_batch(columns, Gather.of(columns["sample_index"]), algorithm, version=VERSION)
    assert {"response_length/mean", "mismatch/kl"} <= found.keys() and not any(name.startswith("reward/") for name in found)


CORRECTIONS: list[dict[str, Any]] = [
    {"rollout_is": "token", "rollout_rs": ["seq_mean_k3", "token_k1"], "rollout_rs_threshold": ["0.02", "0.8_1.25"]},
    {"rollout_is": "sequence", "rollout_is_threshold": "0.7_1.4", "rollout_is_batch_normalize": True},
    {"rollout_is": "token", "rollout_is_batch_normalize": True, "m2po_threshold": 0.01},
]


@pytest.mark.parametrize("changes", CORRECTIONS)
@few
@given(case=cuts())
def test_the_correction(changes: dict[str, Any], case: Any) -> None:
    columns, width, ranks = case
    columns |= {"learn_mask": columns["response_mask"], "advantages": columns["values"]}
    check_cut(partial(rollout_correction, config=RolloutCorrectionConfig(**changes)), columns, width, ranks)


@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES.names() if name in KNOBS])
@few
@given(case=cuts())
def test_the_selection(name: str, case: Any) -> None:
    columns, width, ranks = case
    columns |= {"learn_mask": columns["response_mask"], "advantages": columns["values"]}
    actor = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, kwargs=dict(KNOBS[name])))
    check_cut(partial(select_tokens, actor=actor, seed=3, step=5), columns, width, ranks)


# Controls


def uneven() -> tuple[dict[str, Tensor], int, list[Tensor]]:
    return make_batch(5, 60, 9), 9, [torch.arange(41, 60), torch.arange(20), torch.arange(20, 41)]


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "gdpo", "mine"])
def test_numbers_in_the_order_of_the_ranks_give_other_bits(name: str) -> None:
    check_cut(advantages_of(name), *uneven())
    with pytest.raises(AssertionError):
        check_cut(advantages_of(name), *uneven(), sorts=False)


def test_an_estimator_that_says_that_it_gathers_and_does_not_is_caught() -> None:
    with pytest.raises(AssertionError):
        check_cut(advantages_of("mine_that_gathers"), *uneven())


# Rewards


def test_one_score_a_row_is_the_reward_of_its_last_token() -> None:
    columns = make_batch(2, 12, 6)
    placed = torch.zeros(columns["response_mask"].shape)
    for row, mask in enumerate(columns["response_mask"].tolist()):
        if any(mask):
            placed[row, max(place for place, written in enumerate(mask) if written)] = columns["scores"][row]
    for name in ("gae", "grpo"):
        work, gather = advantages_of(name), Gather.of(columns["sample_index"])
        given, made = work({**columns, "token_level_scores": placed}, gather), work(columns, gather)
        assert given.metrics == made.metrics
        assert all(torch.equal(given.columns[key], made.columns[key]) for key in made.columns)


def errors_of(columns: Columns, width: int, ranks: list[Tensor], name: str = "gae") -> set[str]:
    found = on_ranks(advantages_of(name), cut(columns, width, ranks))
    assert all(isinstance(error, ProtocolError | RewardError) for error in found), "one rank alone would leave others waiting"
    return {str(error) for error in found}


def test_a_reward_on_a_token_of_nobodys_is_named_by_its_sample_on_every_rank() -> None:
    columns, width, ranks = uneven()
    columns["valid"][:] = True
    columns["token_level_scores"] = torch.where(columns["response_mask"].bool(), 1.0, 0.0)
    place = next(token for token, mask in enumerate(columns["response_mask"][47].tolist()) if not mask)
    columns["token_level_scores"][47, place] = 2.5
    columns["response_length"][47] = width  # so that no rank leaves the token out
    (message,) = errors_of(columns, width, ranks)
    assert message.startswith(f"row 47, token {place}: a reward of 2.5 stands where response_mask is 0")


def test_a_reward_beyond_float32_is_named_by_its_sample_on_every_rank() -> None:
    columns, width, ranks = uneven()
    row = int((columns["valid"] & columns["response_mask"].any(1))[20:41].nonzero()[0]) + 20
    columns["values"] = torch.zeros_like(columns["values"])
    columns["scores"][row] = 3.4e38
    columns["scores"][row + 1 :] = 0.0
    columns["baseline_rewards"][:] = -3.4e38
    (message,) = errors_of(columns, width, ranks, "remax")
    assert "its advantages are not finite in float32" in message


BY_SOURCE = [("grpo", "rloo", "gdpo"), ("gae", "gae", "gae"), ("reinforce_plus_plus", "grpo", "optimal_token_baseline")]


def of_source(columns: Columns, number: int) -> dict[str, Tensor]:
    rows = columns["estimator"] == number
    return {name: column[rows] for name, column in columns.items()}


@pytest.mark.parametrize("names", BY_SOURCE)
@few
@given(case=cuts(), in_reward=st.booleans(), whitened=st.booleans())
def test_a_source_with_an_estimator_of_its_own_is_a_batch_of_its_own(
    names: tuple[str, ...], case: Any, in_reward: bool, whitened: bool
) -> None:
    """Its rows get, in every bit, what a batch of these alone gets; so do the rows of all others, and however they are cut."""
    columns, width, ranks = case
    columns["estimator"] = columns["uid"] % 3
    options = {"gamma": 0.9, "lam": 0.8, "use_kl_in_reward": in_reward, "whiten_rewards": whitened}
    general, *own = [AlgorithmConfig(adv_estimator=name, **options) for name in names]
    by_source = {"a/b": own[0], "c": own[1]}
    work = partial(compute_advantages, algorithm=general, kl_coef=0.3, version=VERSION, by_source=by_source)
    check_cut(work, columns, width, ranks)
    whole = work(columns, Gather.of(columns["sample_index"]))
    for number, (name, algorithm) in enumerate([("", general), *by_source.items()]):
        part = of_source(columns, number)
        if not len(part["uid"]):
            assert not any(key.startswith(f"source/{name}/") for key in whole.metrics)
            continue
        alone = compute_advantages(part, Gather.of(part["sample_index"]), algorithm, kl_coef=0.3, version=VERSION)
        for key, column in alone.columns.items():
            assert torch.equal(column, whole.columns[key][columns["estimator"] == number]), (name, key)
        groups = {key: value for key, value in alone.metrics.items() if key.startswith("groups/")}
        assert groups == {key: whole.metrics[f"source/{name}/{key}" if name else key] for key in groups}


def test_statistics_of_a_source_see_no_other_row() -> None:
    """The control: one estimator for all rows gives others."""
    columns = make_batch(3, 12, 6)
    columns["estimator"] = columns["uid"] % 2
    gather, algorithm = Gather.of(columns["sample_index"]), AlgorithmConfig(adv_estimator="reinforce_plus_plus")
    work = partial(compute_advantages, columns, gather, algorithm, version=VERSION)
    apart, together = work(by_source={"a": algorithm}).columns["advantages"], work().columns["advantages"]
    assert not torch.allclose(apart, together)


def test_rows_without_the_number_of_their_estimator_are_refused() -> None:
    columns = make_batch(3, 6, 4)
    algorithm = AlgorithmConfig(adv_estimator="grpo")
    with pytest.raises(ProtocolError, match="no column estimator, by which data.sources"):
        compute_advantages(columns, Gather.of(columns["sample_index"]), algorithm, version=VERSION, by_source={"a": algorithm})
