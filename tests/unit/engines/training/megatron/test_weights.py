"""Who sends what when full weights are streamed."""

from __future__ import annotations

import pytest
import torch

from rlhub.engines.training.megatron.weights import plan_buckets, plan_stream
from rlhub.errors import EngineError
from rlhub.protocol.weights.pieces import PieceInfo, Region, num_elements, whole


def info(name: str, shape: tuple[int, ...], region: Region | None = None) -> PieceInfo:
    return PieceInfo(name=name, shape=shape, region=region or whole(shape), dtype=torch.float32)


def test_each_element_has_one_sender() -> None:
    """Overlapping and repeated pieces of three ranks: the boxes sent make up the tensor, each element once."""
    held = [
        [info("norm", (4,)), info("a", (6, 8), ((0, 4), (0, 5)))],
        [info("norm", (4,)), info("a", (6, 8), ((2, 6), (3, 8)))],
        [info("norm", (4,)), info("a", (6, 8), ((0, 6), (0, 8)))],
    ]
    plan = {tensor.name: tensor for tensor in plan_stream(held)}
    assert plan["norm"].sources == []  # every rank has all of it
    times = torch.zeros(6, 8)
    for source in plan["a"].sources:
        (top, bottom), (left, right) = source.region
        times[top:bottom, left:right] += 1
    assert (times == 1).all()
    assert sum(num_elements(source.region) for source in plan["a"].sources if source.rank == 0) == 20


def test_a_hole_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"weight: no rank holds \(\(2, 3\), \(0, 2\)\) of \(3, 2\)"):
        plan_stream([[info("weight", (3, 2), ((0, 1), (0, 2)))], [info("weight", (3, 2), ((1, 2), (0, 2)))]])


def test_buckets() -> None:
    tensors = plan_stream([[info("a", (4,)), info("b", (2,)), info("c", (100,)), info("d", (1,))]])
    assert [[tensor.name for tensor in bucket] for bucket in plan_buckets(tensors, 24)] == [["a", "b"], ["c"], ["d"]]
