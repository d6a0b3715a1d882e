"""Fingerprints notice every change of an element; a single element that is not finite is found, and large values pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhub.protocol.weights.fingerprint import checksum, combine, digests, fingerprint, nonfinite_names


def on_device(tensor: Tensor) -> int:
    """The accelerator's way, computed on CPU."""
    return checksum(tensor.contiguous().reshape(-1))


BOTH = pytest.mark.parametrize("digest", [fingerprint, on_device])
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_changed_element_changes_it(digest: Callable[[Tensor], int], dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (13, 7)).to(dtype)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    for index in (0, 45, 90):
        changed = tensor.clone()
        changed.view(-1)[index] = 1 - changed.view(-1)[index].to(torch.int64)
        assert digest(changed) != before


@BOTH
def test_the_least_bit_and_exchanged_elements_change_it(digest: Callable[[Tensor], int]) -> None:
    tensor = torch.randn(1000)
    nudged = tensor.clone()
    nudged[500] = torch.nextafter(nudged[500], torch.tensor(9.0))
    exchanged = tensor.clone()
    exchanged[[3, 700]] = exchanged[[700, 3]]
    assert len({digest(tensor), digest(nudged), digest(exchanged), digest(tensor[:-1])}) == 4


@BOTH
def test_strides_do_not_matter_but_order_does(digest: Callable[[Tensor], int]) -> None:
    tensor = torch.randn(6, 10)
    assert digest(tensor[:, 2:5]) == digest(tensor[:, 2:5].clone())
    assert digest(tensor.t()) == digest(tensor.t().contiguous()) != digest(tensor)


def test_checksum_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1001)
    whole = checksum(tensor)
    monkeypatch.setattr("rlhub.protocol.weights.fingerprint.CHUNK_ELEMENTS", 64)
    assert checksum(tensor) == whole


def test_scalars_and_empty_tensors_have_one() -> None:
    assert fingerprint(torch.tensor(1.5)) != fingerprint(torch.tensor(2.5))
    assert fingerprint(torch.empty(0)) == fingerprint(torch.empty(0, 3))


def test_combine_reads_names_and_values_in_any_order() -> None:
    assert combine([("a", 1), ("b", 2)]) == combine([("b", 2), ("a", 1)])
    assert len({combine([("a", 1), ("b", 2)]), combine([("a", 2), ("b", 1)]), combine([("a", 1)]), combine([])}) == 4


def test_digests_fit_a_signed_word_and_change_with_any_element() -> None:
    tensors = [torch.arange(size, dtype=torch.float32) for size in (0, 1, 1000)]
    before = digests(tensors)
    assert before == digests(tensor.clone() for tensor in tensors)
    assert torch.tensor(before).dtype == torch.int64 and len(set(before)) == 3
    tensors[2][999] = torch.nextafter(tensors[2][999], torch.tensor(torch.inf))
    after = digests(tensors)
    assert after[:2] == before[:2] and after[2] != before[2]


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
    """The squares of these values are not finite."""
    assert (
        nonfinite_names([("large", torch.full((1000,), 3e38)), ("half", torch.full((1 << 20,), 6e4, dtype=torch.float16))]) == []
    )
