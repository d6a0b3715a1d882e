"""Estimators over calls of episodes against loops over each episode, and the same in every bit however rows are dealt out."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhub.algorithms.advantages.gae import ChunkGAEKnobs
from rlhub.algorithms.estimation import advantage_inputs
from rlhub.algorithms.inputs import AdvantageInputs, AdvantageOutputs
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS
from rlhub.algorithms.statistics import HERE, Gather
from rlhub.errors import ProtocolError

NAMES = sorted(name for name in ADVANTAGE_ESTIMATORS.names() if "episodes" in ADVANTAGE_ESTIMATORS.row(name).requires)
TOKENS = 4


def test_these_are_all() -> None:
    assert NAMES == ["chunk_gae", "chunk_grpo"]


def columns(seed: int, episodes: int = 9, *, lost: float = 0.15) -> dict[str, Tensor]:
    """Calls of episodes of 1 to 5 calls, in mixed order; some calls were lost, and some executed half of their actions."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    rows = [(e, t) for e in range(episodes) for t in range(1 + int(draw(1) * 5))]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
    last = {e: max(t for other, t in rows if other == e) for e, _ in rows}
    ends = {e: bool(draw(1) < 0.5) for e in last}
    mask = torch.ones(len(rows), TOKENS, dtype=torch.bool)
    mask[draw(len(rows)) < 0.3, TOKENS // 2 :] = False
    mask[draw(len(rows)) < lost] = False
    rewards = torch.zeros(len(rows), TOKENS)
    rewards[:, TOKENS // 2 - 1] = (draw(len(rows)) * 4).round()
    return {
        "token_level_rewards": rewards * mask,
        "response_mask": mask,
        "values": torch.where(mask, draw(len(rows), TOKENS), math.nan),
        "next_values": draw(len(rows)),
        "episode": torch.tensor([100 + e for e, _ in rows]),
        "call": torch.tensor([t for _, t in rows]),
        "terminated": torch.tensor([t == last[e] and ends[e] for e, t in rows]),
        "group": torch.where(mask.any(1), torch.tensor([e // 3 for e, _ in rows]), -1 - torch.arange(len(rows))),
    }


def estimate(name: str, columns: dict[str, Tensor], gather: Gather = HERE, **knobs: Any) -> AdvantageOutputs:
    found: AdvantageOutputs = ADVANTAGE_ESTIMATORS.get(name)(
        AdvantageInputs(**columns, gather=gather), ADVANTAGE_ESTIMATORS.knobs_class(name)(**knobs)
    )
    return found


def by_episode(columns: dict[str, Tensor]) -> dict[int, dict[int, int]]:
    """The row of each call of each episode."""
    found: dict[int, dict[int, int]] = {}
    for row, (episode, call) in enumerate(zip(columns["episode"].tolist(), columns["call"].tolist(), strict=True)):
        found.setdefault(episode, {})[call] = row
    return found


def slow_gae(columns: dict[str, Tensor], gamma: float, lam: float) -> dict[int, float]:
    """By the definition: the discounted sum of deltas until the episode breaks off; lost calls have none."""
    found = {}
    mask, rewards, values = columns["response_mask"], columns["token_level_rewards"].double(), columns["values"].double()
    for calls in by_episode(columns).values():
        alive = {t: row for t, row in calls.items() if mask[row].any()}
        for start, row in alive.items():
            total, t = 0.0, start
            while t in alive:
                here, following = alive[t], alive.get(t + 1)
                ended = bool(columns["terminated"][here])
                after = 0.0 if ended else float(columns["next_values"][here])
                if following is not None and not ended:
                    after = float(values[following, 0])
                delta = float(rewards[here].sum()) + gamma * after - float(values[here, 0])
                total += (gamma * lam) ** (t - start) * delta
                t += 1
            found[row] = total
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("gamma", "lam"), [(0.8, 0.8), (1.0, 1.0), (0.99, 0.0)])
def test_chunk_gae(seed: int, gamma: float, lam: float) -> None:
    given = columns(seed)
    wanted = slow_gae(given, gamma, lam)
    outputs = estimate("chunk_gae", given, gamma=gamma, lam=lam, whiten=False)
    for row, mask in enumerate(given["response_mask"]):
        expected = torch.where(mask, wanted.get(row, 0.0), 0.0)
        torch.testing.assert_close(outputs.advantages[row], expected.float())
        value = float(given["values"][row, 0]) if mask.any() else 0.0
        torch.testing.assert_close(outputs.returns[row], torch.where(mask, wanted.get(row, 0.0) + value, 0.0).float())
    white = estimate("chunk_gae", given, gamma=gamma, lam=lam).advantages
    mean, std = statistics.mean(wanted.values()), statistics.stdev(wanted.values())
    for row, number in wanted.items():
        torch.testing.assert_close(float(white[row, 0]), (number - mean) / std, rtol=1e-5, atol=1e-6)


def test_a_time_limit_bootstraps_and_an_end_does_not() -> None:
    mask = torch.ones(2, 1, dtype=torch.bool)
    given = {
        "token_level_rewards": torch.ones(2, 1),
        "response_mask": mask,
        "values": torch.zeros(2, 1),
        "next_values": torch.full((2,), 10.0),
        "episode": torch.tensor([0, 1]),
        "call": torch.tensor([0, 0]),
        "terminated": torch.tensor([True, False]),
    }
    assert estimate("chunk_gae", given, gamma=0.5, whiten=False).advantages.tolist() == [[1.0], [6.0]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("divide", [True, False])
def test_chunk_grpo(seed: int, divide: bool) -> None:
    given = columns(seed)
    returns, groups = {}, {}
    for episode, calls in by_episode(given).items():
        if all(given["response_mask"][row].any() for row in calls.values()):
            returns[episode] = sum(float(given["token_level_rewards"][row].sum()) for row in calls.values())
            groups.setdefault(int(given["group"][next(iter(calls.values()))]), []).append(episode)
    outputs = estimate("chunk_grpo", given, norm_adv_by_std_in_grpo=divide)
    for row, mask in enumerate(given["response_mask"]):
        episode, expected = int(given["episode"][row]), 0.0
        if episode in returns:
            others = [returns[one] for one in groups[int(given["group"][row])]]
            if len(others) > 1 and max(others) > min(others):
                expected = returns[episode] - statistics.mean(others)
                expected /= statistics.stdev(others) + 1e-6 if divide else 1.0
        torch.testing.assert_close(outputs.advantages[row], torch.where(mask, expected, 0.0).float(), rtol=1e-5, atol=1e-6)


def test_an_episode_counts_once_however_many_calls_it_has() -> None:
    """The control: with one number a row, as for prompts, the long episode would count three times."""
    given = {
        "token_level_rewards": torch.tensor([[0.0], [0.0], [3.0], [1.0]]),
        "response_mask": torch.ones(4, 1, dtype=torch.bool),
        "episode": torch.tensor([0, 0, 0, 1]),
        "call": torch.tensor([0, 1, 2, 0]),
        "terminated": torch.tensor([False, False, True, True]),
        "group": torch.zeros(4, dtype=torch.int64),
    }
    found = estimate("chunk_grpo", given, norm_adv_by_std_in_grpo=False).advantages[:, 0]
    assert found.tolist() == [1.0, 1.0, 1.0, -1.0]
    rows = {name: given[name] for name in ("token_level_rewards", "response_mask", "group")}
    assert estimate("grpo", rows, norm_adv_by_std_in_grpo=False).advantages[:, 0].tolist() == [-1.0, -1.0, 2.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", [2, 3])
def test_rows_may_be_dealt_out_in_any_way(name: str, parts: int) -> None:
    """Each process gets every third row; what the others have comes from a gather that a list of all rows stands in for."""
    given = columns(5, episodes=12)
    whole = estimate(name, given)
    count = len(given["episode"])
    dealt = [torch.arange(first, count, parts) for first in range(parts)]
    for rows in dealt:
        own = {key: column[rows] for key, column in given.items()}
        everyone = collected(given, torch.cat(dealt), name)
        outputs = estimate(name, own, Gather.of(rows, everyone))
        assert torch.equal(outputs.advantages, whole.advantages[rows]) and torch.equal(outputs.returns, whole.returns[rows])
        assert outputs.metrics == whole.metrics


def collected(given: dict[str, Tensor], order: Tensor, name: str) -> Any:
    """What the other processes would send: the numbers that the estimator makes of the whole batch, in their order."""
    sent: list[Tensor] = []
    estimate(name, given, Gather(torch.arange(len(order)), torch.arange(len(order)), lambda rows: sent.append(rows) or rows))
    answers = iter([order, *(rows[order] for rows in sent)])
    return lambda _: next(answers)


def test_a_missing_column_is_named() -> None:
    rows = {name: torch.zeros(2, 3) for name in ("values",)} | {"uid": torch.arange(2), "sample_index": torch.arange(2)}
    mask = torch.ones(2, 3)
    with pytest.raises(ProtocolError, match="episode, call, terminated, next_values, which adv_estimator=chunk_gae reads"):
        advantage_inputs(rows, mask, torch.ones(2, dtype=torch.bool), mask, HERE, "chunk_gae")


@pytest.mark.parametrize("wrong", [{"gamma": 0.0}, {"gamma": 1.1}, {"lam": -0.1}])
def test_discounts_outside_their_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="gamma="):
        ChunkGAEKnobs(**wrong)
