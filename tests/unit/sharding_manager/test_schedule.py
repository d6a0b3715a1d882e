"""Rounds: few, within the buffers, and the same seen from both ends."""

from __future__ import annotations

import pytest
import torch

from rlhub.errors import ReshardError
from rlhub.protocol.weights.pieces import PieceInfo, num_elements
from rlhub.sharding_manager.plan import Plan, make_plan
from rlhub.sharding_manager.schedule import rank_plan, schedule
from tests.support.layouts import fsdp_layout, full_layout
from tests.unit.sharding_manager.plan_execution import Layout, assert_fits

BF16 = torch.bfloat16


def separate(sources: Layout, destinations: Layout) -> Plan:
    there = range(len(sources), len(sources) + len(destinations))
    return make_plan(sources, destinations, source_processes=range(len(sources)), destination_processes=there)


def regions(plan: Plan, bucket_bytes: int) -> list[list[tuple[tuple[int, int], ...]]]:
    return [[part.region for message in one.messages for part in message.transfers] for one in schedule(plan, bucket_bytes)]


def test_a_large_transfer_is_cut_along_rows_and_a_large_row_along_the_next_dimension() -> None:
    plan = separate(full_layout({"a": (3, 8)}, 1), full_layout({"a": (3, 8)}, 1))
    row = 16
    assert regions(plan, 3 * row) == [[((i, i + 1), (0, 8)) for i in range(3)]]
    assert regions(plan, row) == [[((i, i + 1), (0, 8))] for i in range(3)]
    assert regions(plan, row - 2) == [
        *([[((0, 1), (i, i + 1)) for i in range(start, min(start + 7, 8))] for start in (0,)]),
        [((0, 1), (7, 8)), *(((1, 2), (i, i + 1)) for i in range(6))],
        [*(((1, 2), (i, i + 1)) for i in (6, 7)), *(((2, 3), (i, i + 1)) for i in range(5))],
        [((2, 3), (i, i + 1)) for i in (5, 6, 7)],
    ]


def test_an_element_larger_than_a_bucket_is_an_error() -> None:
    plan = separate(full_layout({"a": (3,)}, 1), full_layout({"a": (3,)}, 1))
    with pytest.raises(ReshardError, match="one element of a has 2 bytes, a bucket 1"):
        schedule(plan, 1)


@pytest.mark.parametrize(("sources", "destinations"), [(1, 4), (4, 1), (4, 4), (3, 5), (8, 2)])
def test_rounds_are_about_as_few_as_the_busiest_rank_needs(sources: int, destinations: int) -> None:
    tensors = {f"w{i}": (40 + i, 16) for i in range(8)}
    plan = separate(fsdp_layout(tensors, sources, dtype=BF16), full_layout(tensors, destinations))
    bucket = 2048
    rounds = schedule(plan, bucket)
    assert_fits(rounds, bucket)
    least = max(*plan.sent_bytes, *plan.received_bytes) / bucket
    assert least <= len(rounds) <= 1.4 * least + 1  # rounds are filled to three quarters or more


def test_both_ends_see_the_same_messages_and_the_widest_dtype_comes_first() -> None:
    pieces = [
        PieceInfo(name=name, shape=(3,), region=((0, 3),), dtype=dtype)
        for name, dtype in (("half", BF16), ("byte", torch.int8), ("full", torch.float32))
    ]
    (one,) = schedule(separate([pieces], [pieces, pieces]), 1000)
    assert [transfer.name for transfer in one.messages[0].transfers] == ["full", "half", "byte"]
    assert one.sent_by(0) == one.messages and [one.received_by(rank) for rank in (0, 1)] == [
        [message] for message in one.messages
    ]


@pytest.mark.parametrize(("device", "blocks"), [("cpu", 32), ("cuda", 1)])
def test_a_gpu_copies_in_larger_blocks(device: str, blocks: int) -> None:
    layout = full_layout({"a": (4096, 4096)}, 1)
    plan = make_plan(layout, layout, source_processes=[0], destination_processes=[0])
    mine = rank_plan(plan, [], source=0, destination=0, source_peers=[0], destination_peers=[0], device=device)
    assert len(mine.copies) == blocks and sum(num_elements(copy.region) for copy in mine.copies) == 4096 * 4096
