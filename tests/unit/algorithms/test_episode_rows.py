"""However an episode is cut into rows, each of its tokens has the advantage that it has in one row; the episode counts once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhub.algorithms.estimation import ColumnOutputs, compute_advantages
from rlhub.algorithms.registry import ADVANTAGE_ESTIMATORS
from rlhub.algorithms.statistics import HERE, EpisodeRows, Gather
from rlhub.config.sections.algorithm import AlgorithmConfig
from tests.unit.algorithms.estimation_cases import Columns, cut, make_batch
from tests.unit.algorithms.test_estimation_cuts import on_ranks

EXACT = ["grpo", "grpo_passk", "rloo", "opo", "gpg", "cpgd"]
WHITENED = ["reinforce_plus_plus_baseline", "gdpo", "reinforce_plus_plus"]
WIDTH = 12


def test_every_estimator_of_one_number_a_sample_is_here() -> None:
    companions = {name for name in ADVANTAGE_ESTIMATORS.names() if ADVANTAGE_ESTIMATORS.companion(name, "per_sample")}
    assert {name for name in companions if ADVANTAGE_ESTIMATORS.get(name).__module__.startswith("rlhub.")} == set(EXACT)


def episodes(seed: int) -> dict[str, Tensor]:
    return make_batch(seed, 12, WIDTH)


def in_rows(batch: Columns, seed: int) -> dict[str, Tensor]:
    """Each episode as one to three rows: the same tokens, of which each is in the mask of one row."""
    generator = torch.Generator().manual_seed(seed)
    source, masks = [], []
    for row, mask in enumerate(batch["response_mask"]):
        written = mask.nonzero().squeeze(1)
        parts = min(int(torch.randint(1, 4, (1,), generator=generator)), max(len(written), 1))
        owners = torch.cat([torch.arange(parts), torch.randint(0, parts, (len(written),), generator=generator)])[: len(written)]
        for part in range(parts):
            source.append(row)
            masks.append(torch.zeros_like(mask).index_fill(0, written[owners == part], 1))
    rows = torch.tensor(source)
    found = {name: column[rows] for name, column in batch.items()}
    return found | {"response_mask": torch.stack(masks), "episode_id": rows, "sample_index": torch.arange(len(rows))}


def advantages(columns: Columns, gather: Gather, name: str) -> ColumnOutputs:
    return compute_advantages(columns, gather, AlgorithmConfig(adv_estimator=name), kl_coef=0.0, version=7)


def of_episodes(columns: Columns, values: Tensor) -> Tensor:
    """The sum over each episode's rows, of which one has a token in its mask."""
    return torch.zeros(12, WIDTH, dtype=values.dtype).index_add(0, columns["episode_id"], values)


@pytest.mark.parametrize("name", [*EXACT, *WHITENED])
def test_a_token_has_the_advantage_of_its_episode(name: str) -> None:
    differing = 0
    for seed in range(20):
        whole = episodes(seed)
        rows = in_rows(whole, seed)
        expected, found = advantages(whole, HERE, name), advantages(rows, HERE, name)
        got = of_episodes(rows, found.columns["advantages"])
        if name in EXACT:
            assert torch.equal(got, expected.columns["advantages"])
        else:
            torch.testing.assert_close(got, expected.columns["advantages"], rtol=1e-5, atol=1e-5)
        assert torch.equal(of_episodes(rows, found.columns["learn_mask"].long()), expected.columns["learn_mask"].long())
        for metric in ("reward/mean", "reward/std", "groups/num", "groups/all_equal", "groups/singleton"):
            assert found.metrics.get(metric) == pytest.approx(expected.metrics.get(metric), abs=1e-12), metric
        alone = advantages({key: column for key, column in rows.items() if key != "episode_id"}, HERE, name)
        differing += not torch.allclose(of_episodes(rows, alone.columns["advantages"]), got)
    # opo weights rows by their tokens, and reinforce_plus_plus has no groups: neither sees how many rows there are.
    assert differing > 5 or name in ("opo", "reinforce_plus_plus"), "rows that count as episodes of their own must be noticed"


@pytest.mark.parametrize("name", [*EXACT, *WHITENED])
def test_rows_of_an_episode_may_be_on_several_ranks(name: str) -> None:
    rows = in_rows(episodes(3), 3)
    whole = advantages(rows, HERE, name)
    order = torch.randperm(len(rows["uid"]), generator=torch.Generator().manual_seed(1))
    ranks = [order[:5], order[5:6], order[6:]]

    def work(part: Columns, gather: Gather) -> ColumnOutputs:
        return advantages(part, gather, name)

    for own, outputs in zip(ranks, on_ranks(work, cut(rows, WIDTH, ranks)), strict=True):
        column = outputs.columns["advantages"]
        assert torch.equal(column, whole.columns["advantages"][own][:, : column.shape[1]])
        assert outputs.metrics == whole.metrics


def test_an_episode_whose_rows_have_equal_rewards_has_exactly_theirs() -> None:
    """A mean of three tenths is none: over 1e-6, its rounding would be a large advantage."""
    tenth = torch.tensor([0.1] * 6, dtype=torch.float64)
    rows = EpisodeRows.of(torch.zeros(6, dtype=torch.int64), torch.tensor([0, 1, 1, 1, 2, 2]))
    assert rows.means(tenth).tolist() == [0.1] * 3 and (tenth[:3].sum() / 3).item() != 0.1
    assert rows.means(torch.tensor([1.0, 2.0, 4.0, 6.0, -1.0, 3.0], dtype=torch.float64)).tolist() == [1.0, 4.0, 1.0]


def test_numbers_by_episode() -> None:
    group, episode_id = torch.tensor([5, 5, -1, 5, 2]), torch.tensor([8, 3, 3, 8, 3])
    rows = EpisodeRows.of(group, episode_id)
    assert rows.index is not None and rows.index.tolist() == [0, 1, 2, 0, 3]
    values: Any = torch.tensor([1, 10, 100, 1000, 10000])
    assert rows.totals(values).tolist() == [1001, 10, 100, 10000] and rows.firsts(values).tolist() == [1, 10, 100, 10000]
    assert rows.each(torch.tensor([1, 2, 3, 4])).tolist() == [1, 2, 3, 1, 4]
    assert rows.leading.tolist() == [True, True, True, False, True]
    assert EpisodeRows.of(torch.arange(3), torch.zeros(3).long()).index is None


@pytest.mark.parametrize("name", sorted(name for name in ADVANTAGE_ESTIMATORS.names() if name != "chunk_grpo"))
def test_a_failed_episode_is_a_smaller_group_to_every_estimator(name: str) -> None:
    """Its number is missing in `episode_id`, and nothing else tells of it: neither in values nor in metrics."""
    for seed in range(5):
        batch = make_batch(seed, 24, WIDTH)
        kept = torch.rand(24, generator=torch.Generator().manual_seed(seed)) < 0.7
        left = {name: column[kept] for name, column in batch.items()}
        left |= {"sample_index": torch.arange(int(kept.sum())), "uid": left["uid"]}
        numbered = left | {"episode_id": torch.arange(24)[kept]}
        alone, found = advantages(left, HERE, name), advantages(numbered, HERE, name)
        assert found.metrics == alone.metrics
        for column in ("advantages", "returns", "learn_mask"):
            assert torch.equal(found.columns[column].nan_to_num(7), alone.columns[column].nan_to_num(7)), column
