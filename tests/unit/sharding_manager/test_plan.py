"""The plan from any layout to any other, carried out on real tensors: values, bytes, buffers, and clear errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhub.errors import ReshardError
from rlhub.protocol.weights.pieces import PieceInfo, Region, whole
from rlhub.sharding_manager.plan import Plan, make_plan
from rlhub.sharding_manager.schedule import schedule
from tests.support.layouts import DecoderShape, fsdp_layout, full_layout, megatron_layout, shapes, vllm_layout
from tests.unit.sharding_manager.plan_execution import (
    Layout,
    assert_fits,
    assert_holds,
    execute,
    full_weights,
    hold,
    slow_lower_bound,
)

BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN, HEAD_DIM = 8, 2


@st.composite
def models(draw: st.DrawFn) -> DecoderShape:
    experts = draw(st.sampled_from([0, 4]))
    return DecoderShape(
        vocab_size=draw(st.sampled_from([9, 67])),
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_layers=draw(st.integers(1, 4)),
        num_heads=8,
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        head_dim=HEAD_DIM,
        num_experts=experts,
        moe_intermediate_size=4,
        num_dense_layers=draw(st.integers(0, 1)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


def fsdp(draw: st.DrawFn, model: DecoderShape) -> Layout:
    return fsdp_layout(shapes(model), draw(st.integers(1, 5)), replicas=draw(st.integers(1, 2)), dtype=draw(dtypes))


def megatron(draw: st.DrawFn, model: DecoderShape) -> Layout:
    tp = draw(st.sampled_from([size for size in (1, 2, 4) if model.num_kv_heads % size == 0]))
    expert_tp = draw(st.sampled_from([1, tp]))
    ep = draw(st.sampled_from([1, 2])) if model.num_experts else 1
    dp = draw(st.integers(1, 2)) * ep
    pp, vpp = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    multiple = draw(st.sampled_from([1, 8]))
    return megatron_layout(
        model, tp=tp, pp=pp, ep=ep, dp=dp, vpp=vpp, expert_tp=expert_tp, vocab_multiple=multiple, dtype=draw(dtypes)
    )


def vllm(draw: st.DrawFn, model: DecoderShape) -> Layout:
    tp = draw(st.sampled_from([1, 2, 4]))  # with more ranks than key-value heads, too
    ep = draw(st.sampled_from([1, 4])) if model.num_experts else 1
    return vllm_layout(model, tp=tp, ep=ep, replicas=draw(st.integers(1, 2)), dtype=draw(dtypes))


def full(draw: st.DrawFn, model: DecoderShape) -> Layout:
    return full_layout(shapes(model), draw(st.integers(1, 3)), dtype=draw(dtypes))


def scattered(draw: st.DrawFn, model: DecoderShape) -> Layout:
    """Boxes that no backend has: each tensor cut at random places and dealt out, some boxes to several ranks."""
    ranks, random = draw(st.integers(1, 3)), Random(draw(st.integers(0, 1000)))
    layout: list[list[PieceInfo]] = [[] for _ in range(ranks)]
    dtype = draw(dtypes)
    for name, shape in shapes(model).items():
        for i, region in enumerate(_boxes(random, shape)):
            for rank in {i % ranks, random.randrange(ranks)}:
                layout[rank].append(PieceInfo(name=name, shape=shape, region=region, dtype=dtype))
    return layout


def _boxes(random: Random, shape: Sequence[int]) -> list[Region]:
    boxes: list[Region] = [()]
    for size in shape:
        at = random.randint(0, size)
        boxes = [(*box, part) for box in boxes for part in ((0, at), (at, size))]
    return boxes


dtypes = st.sampled_from([FP32, BF16])
Maker = Callable[[st.DrawFn, DecoderShape], Layout]
SOURCES: tuple[Maker, ...] = (fsdp, megatron, full, scattered)
DESTINATIONS: tuple[Maker, ...] = (vllm, full, fsdp, megatron, scattered)


def plan_for(sources: Layout, destinations: Layout, first_process: int = 0) -> tuple[Plan, int]:
    """A plan where destination rank i lives in process first_process + i; and the bound, counted element by element."""
    here, there = range(len(sources)), range(first_process, first_process + len(destinations))
    plan = make_plan(sources, destinations, source_processes=here, destination_processes=there)
    return plan, slow_lower_bound(sources, destinations, here, there)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_every_destination_has_the_full_weights_slice(data: st.DataObject) -> None:
    model = data.draw(models())
    sources = data.draw(st.sampled_from(SOURCES))(data.draw, model)
    destinations = data.draw(st.sampled_from(DESTINATIONS))(data.draw, model)
    bucket = data.draw(st.sampled_from([64, 500, 1 << 20]))
    first_process = data.draw(st.integers(0, len(sources)))  # all of them in one process, some, or none
    plan, bound = plan_for(sources, destinations, first_process)
    assert plan.wire_bytes == plan.lower_bound == bound
    rounds = schedule(plan, bucket)
    assert_fits(rounds, bucket)
    assert sum(message.num_bytes for one in rounds for message in one.messages) == bound
    full_tensors, filled = full_weights(sources), hold(destinations)
    execute(plan, rounds, hold(sources, full_tensors), filled)
    assert_holds(filled, full_tensors)


def piece(name: str, region: Region, shape: tuple[int, ...] = (8, 4), dtype: torch.dtype = FP32) -> PieceInfo:
    return PieceInfo(name=name, shape=shape, region=region, dtype=dtype)


TOP, BOTTOM, ALL = ((0, 4), (0, 4)), ((4, 8), (0, 4)), ((0, 8), (0, 4))


def test_one_transfer_shifted_by_a_row_is_found() -> None:
    """The control of the property above: its checks see a plan that is wrong in one place."""
    sources, destinations = [[piece("a", TOP)], [piece("a", BOTTOM)]], [[piece("a", ((0, 6), (0, 4)))]]
    plan, _ = plan_for(sources, destinations, first_process=2)
    full_tensors = full_weights(sources)
    execute(plan, schedule(plan, 1 << 20), hold(sources, full_tensors), hold(destinations))
    second = plan.receives[0][1]
    assert second.region == ((4, 6), (0, 4))
    second.region = ((5, 7), (0, 4))
    filled = hold(destinations)
    with pytest.raises(AssertionError):
        execute(plan, schedule(plan, 1 << 20), hold(sources, full_tensors), filled)
        assert_holds(filled, full_tensors)


def test_shifted_values_are_found() -> None:
    sources = [[piece("a", ALL)]]
    plan, _ = plan_for(sources, sources, first_process=1)
    shifted = {name: tensor.roll(1, 0) for name, tensor in full_weights(sources).items()}
    filled = hold(sources)
    execute(plan, schedule(plan, 1 << 20), hold(sources, shifted), filled)
    with pytest.raises(AssertionError, match="rank 0 has other values of a"):
        assert_holds(filled, full_weights(sources))


def test_what_the_own_process_holds_is_copied() -> None:
    sources = [[piece("a", TOP)], [piece("a", BOTTOM)]]
    plan, _ = plan_for(sources, [[piece("a", ALL, dtype=BF16)], [piece("a", BOTTOM)]])
    assert [(transfer.source, transfer.region) for transfer in plan.copies[0]] == [(0, TOP)]
    assert [(transfer.source, transfer.region, transfer.dtype) for transfer in plan.receives[0]] == [(1, BOTTOM, BF16)]
    assert [transfer.region for transfer in plan.copies[1]] == [BOTTOM] and plan.receives[1] == []
    assert plan.received_bytes == [4 * 4 * 2, 0] and plan.sent_bytes == [0, 4 * 4 * 2]
    assert plan.sends(1) == plan.receives[0] and plan.sends(0) == []


def test_query_groups_become_one_transfer() -> None:
    groups = [[piece("q", ((start, start + 2), (0, 4))) for start in (4, 0, 2, 6)]]
    plan, _ = plan_for(groups, [[piece("q", TOP), piece("q", BOTTOM)]], first_process=1)
    assert [transfer.region for transfer in plan.receives[0]] == [ALL]


def test_the_same_machine_sends_where_it_can_and_replicas_share_the_rest() -> None:
    tensors = {f"w{i}": (8, 4) for i in range(12)}
    sources, destinations = full_layout(tensors, 4), full_layout(tensors, 3)
    processes = {"source_processes": range(4), "destination_processes": range(4, 7)}
    balanced = make_plan(sources, destinations, **processes)
    assert balanced.sent_bytes == [9 * 64] * 4
    nodes = {0: 0, 1: 0, 2: 1, 3: 1, 4: 0, 5: 1, 6: 2}
    near = make_plan(sources, destinations, **processes, nodes=nodes)
    assert {transfer.source for transfer in near.receives[0]} == {0, 1}
    assert {transfer.source for transfer in near.receives[1]} == {2, 3}
    assert near.sent_bytes == [9 * 64] * 4


def test_what_only_one_can_send_counts_first() -> None:
    both, single = {"shared0": (8, 4), "shared1": (8, 4)}, {"single0": (8, 4), "single1": (8, 4)}
    sources = [*full_layout({**both, **single}, 1), *full_layout(both, 1)]
    plan, _ = plan_for(sources, full_layout({**both, **single}, 1), first_process=2)
    assert plan.sent_bytes == [128, 128]


def test_two_processes_make_the_same_plan() -> None:
    model = DecoderShape(
        vocab_size=67, hidden_size=8, intermediate_size=8, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=2, num_experts=4
    )
    model = replace(model, moe_intermediate_size=4)
    sides = megatron_layout(model, tp=2, pp=2, dp=4, ep=2), vllm_layout(model, tp=2, ep=4, replicas=2)
    first, second = (plan_for(*sides, first_process=16)[0] for _ in range(2))
    assert first == second and schedule(first, 200) == schedule(second, 200)


def errors() -> list[tuple[str, Layout, Layout, str]]:
    good = [[piece("a", ALL), piece("b", ALL)]]
    return [
        ("missing at the source", [[piece("a", ALL)]], good, "the destination has b, but no source rank does"),
        ("surplus at the source", good, [[piece("b", ALL)]], "a source rank has a, but no destination rank does"),
        ("other shape", [[piece("a", whole((8, 5)), (8, 5))]], [[piece("a", ALL)]], "a has the full shape .8, 5. at the source"),
        (
            "shapes differ on one side",
            [[piece("a", ALL)], [piece("a", ALL, (9, 4))]],
            good,
            "destination|source rank 1 says that a",
        ),
        ("uncovered", [[piece("a", TOP)]], [[piece("a", TOP)], [piece("a", ALL)]], "part ..4, 8., .0, 4.. of a .* rank 1"),
        (
            "overlap",
            [[piece("a", ALL)]],
            [[piece("a", TOP), piece("a", ((3, 8), (0, 4)))]],
            "rank 0 describes parts of a that overlap",
        ),
        ("twice", [[piece("a", ALL)]], [[piece("a", ALL), piece("a", ALL)]], "overlap"),
        ("outside", [[piece("a", ((0, 9), (0, 4)))]], [[piece("a", ALL)]], "not inside its full shape"),
        ("two dtypes", [[piece("a", TOP), piece("a", BOTTOM, dtype=BF16)]], [[piece("a", ALL)]], "one dtype is needed"),
    ]


@pytest.mark.parametrize(
    ("sources", "destinations", "message"), [case[1:] for case in errors()], ids=[case[0] for case in errors()]
)
def test_layouts_that_do_not_fit_are_named(sources: Layout, destinations: Layout, message: str) -> None:
    with pytest.raises(ReshardError, match=message) as caught:
        plan_for(sources, destinations, first_process=9)
    assert caught.value.weight in ("a", "b")


def test_nothing_to_do_is_a_plan() -> None:
    empty: Layout = [[piece("a", ((0, 0), (0, 4)), (0, 4))]]
    plan, bound = plan_for(empty, empty, first_process=1)
    assert plan.wire_bytes == bound == 0 and schedule(plan, 8) == []
