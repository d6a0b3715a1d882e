"""A single element that is not finite is found, wherever it is; everything that is finite passes, however large."""

from __future__ import annotations

import pytest
import torch

from rlhub.protocol.weights.fingerprint import nonfinite_names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_element_is_found(dtype: torch.dtype, value: float) -> None:
    for place in (0, 12_345, 69_999):
        tensors = {name: torch.ones(70_000, dtype=dtype) for name in "abc"}
        tensors["b"][place] = value
        assert nonfinite_names(tensors.items()) == ["b"]


def test_views_and_pieces_of_one_tensor() -> None:
    matrix = torch.ones(8, 8)
    matrix[5, 2] = float("nan")
    assert nonfinite_names([("m", matrix[:4]), ("m", matrix[4:]), ("m", matrix.T[:, 4:])]) == ["m"]
    assert nonfinite_names([("m", matrix[:, 3:]), ("empty", torch.empty(0)), ("count", torch.ones(3, dtype=torch.int64))]) == []


def test_large_values_pass() -> None:
    """Whose squares are not finite."""
    assert (
        nonfinite_names([("large", torch.full((1000,), 3e38)), ("half", torch.full((1 << 20,), 6e4, dtype=torch.float16))]) == []
    )
