"""Group statistics against the standard library, and the counts behind the metrics."""

from __future__ import annotations

import statistics

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhub.algorithms.statistics import group_statistics
from tests.unit.algorithms.cases import assert_close, few

rows = st.lists(st.tuples(st.sampled_from([-5, 0, 3, 10**15]), st.sampled_from([0.0, 0.1, 0.3, 1e6])), max_size=12)


@few
@given(rows)
def test_statistics(cases) -> None:
    ids, rewards = [uid for uid, _ in cases], [reward for _, reward in cases]
    stats = group_statistics(torch.tensor(rewards, dtype=torch.float64), torch.tensor(ids, dtype=torch.int64))
    members = {uid: [reward for other, reward in cases if other == uid] for uid in ids}
    assert_close(stats.size, [float(len(members[uid])) for uid in ids])
    assert_close(stats.mean, [statistics.fmean(members[uid]) for uid in ids])
    assert_close(stats.std, [statistics.stdev(members[uid]) if len(members[uid]) > 1 else 0.0 for uid in ids])
    same = {uid: len(values) > 1 and len(set(values)) == 1 for uid, values in members.items()}
    assert stats.equal.tolist() == [same[uid] for uid in ids]
    assert (stats.num_groups, stats.num_equal) == (len(members), sum(same.values()))
    assert stats.num_singleton == sum(len(values) == 1 for values in members.values())


def test_equality_is_not_read_from_the_rounded_spread() -> None:
    """Seven times 0.1 has a spread by rounding; two rewards a hair apart have one by right."""
    seven = torch.full((7,), 0.1, dtype=torch.float64)
    apart = torch.tensor([1.0, 1.0 + 1e-15], dtype=torch.float64)
    stats = group_statistics(torch.cat([seven, apart]), torch.tensor([0] * 7 + [1] * 2))
    assert stats.equal.tolist() == [True] * 7 + [False] * 2
    assert stats.metrics() == {"groups/num": 2.0, "groups/all_equal": 0.5, "groups/singleton": 0.0}
