"""Mini-batch membership must not depend on the ranks; ranks must hold what chunking sends them, evenly loaded."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhub.protocol import DataProto
from rlhub.trainer.ppo.layout import arrange, capacities_of, mini_batch_ids, part_sizes


def batch_of(lengths: list[int]) -> DataProto:
    mask = (torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]).long()
    return DataProto.from_dict(tensors={"attention_mask": mask, "row": torch.arange(len(lengths))})


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    per_mini_batch=st.integers(1, 17),
    ranks=st.integers(1, 5),
    balance=st.booleans(),
)
def test_membership_is_the_same_for_any_number_of_ranks(lengths, per_mini_batch, ranks, balance) -> None:
    def members(num_ranks: int) -> dict[int, set[int]]:
        batch = arrange(batch_of(lengths), rows_per_mini_batch=per_mini_batch, num_ranks=num_ranks, balance=balance)
        found: dict[int, set[int]] = {}
        for row, index in zip(batch.batch["row"].tolist(), batch.batch["mini_batch"].tolist(), strict=True):
            found.setdefault(index, set()).add(row)
        return found

    assert members(ranks) == members(1)
    assert sorted(row for rows in members(ranks).values() for row in rows) == list(range(len(lengths)))


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), ranks=st.integers(1, 5))
def test_capacities_fill_mini_batches_and_parts(sizes, ranks) -> None:
    plan = capacities_of(sizes, ranks)
    assert [sum(row) for row in plan] == sizes
    assert [sum(row[rank] for row in plan) for rank in range(ranks)] == part_sizes(sum(sizes), ranks)


def test_parts_match_what_chunk_sends() -> None:
    batch = arrange(batch_of([5] * 11), rows_per_mini_batch=4, num_ranks=3, balance=True)
    assert [len(part) for part in batch.chunk(3)] == part_sizes(11, 3)


def test_balancing_evens_out_tokens_and_its_absence_does_not() -> None:
    lengths = [100, 100, 100, 100, 1, 1, 1, 1]

    def worst(balance: bool) -> int:
        batch = arrange(batch_of(lengths), rows_per_mini_batch=8, num_ranks=2, balance=balance)
        return max(int(part.batch["attention_mask"].sum()) for part in batch.chunk(2))

    assert worst(True) == 202
    assert worst(False) >= 202


def test_shuffle_is_a_function_of_the_seed() -> None:
    assert torch.equal(mini_batch_ids(64, 16, 3), mini_batch_ids(64, 16, 3))
    assert not torch.equal(mini_batch_ids(64, 16, 3), mini_batch_ids(64, 16, 4))
    assert mini_batch_ids(64, 16, 3).bincount().tolist() == [16] * 4


def test_the_critic_may_have_mini_batches_of_its_own() -> None:
    batch = arrange(batch_of([5] * 12), rows_per_mini_batch=6, num_ranks=2, balance=True, critic_rows_per_mini_batch=4)
    own = batch.batch["row"] // 4
    assert torch.equal(batch.batch["critic_mini_batch"], own)
    assert batch.batch["mini_batch"].max() == 1
