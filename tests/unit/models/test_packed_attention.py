from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from rlhub.errors import EngineError
from rlhub.models import packed_attention as attention
from rlhub.models.packed_attention import group_lengths, packed_attention, plan_attention

CPU = torch.device("cpu")


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], window: int | None) -> torch.Tensor:
    """(1, heads, tokens, width) -> (1, tokens, heads, width), one token at a time, over the last `window` tokens."""
    repeat = query.shape[1] // key.shape[1]
    out = torch.zeros_like(query)
    first = 0
    for length in lengths:
        for offset in range(length):
            now = first + offset
            oldest = first if window is None else max(first, now + 1 - window)
            for head in range(query.shape[1]):
                keys, values = key[0, head // repeat, oldest : now + 1], value[0, head // repeat, oldest : now + 1]
                weights = (keys @ query[0, head, now] * 0.3).softmax(0)
                out[0, head, now] = weights @ values
        first += length
    return out.transpose(1, 2)


@pytest.mark.parametrize("lengths", [[1], [4, 4, 4], [9, 2, 5, 1, 8, 2], [3, 12]])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 4, 9])
def test_equals_dense_attention(monkeypatch: pytest.MonkeyPatch, lengths: list[int], kv_heads: int, window: int | None) -> None:
    monkeypatch.setattr(attention, "MIN_GROUP_TOKENS", 6)  # so that the short rows make several groups
    torch.manual_seed(0)
    make = lambda heads: torch.randn(1, heads, sum(lengths), 3, dtype=torch.float64, requires_grad=True)  # noqa: E731
    tensors = make(4), make(kv_heads), make(kv_heads)
    factor = torch.randn(1, sum(lengths), 4, 3, dtype=torch.float64)
    plan = plan_attention(lengths, CPU)
    got, _ = packed_attention(torch.nn.Module(), *tensors, None, scaling=0.3, packing=plan, sliding_window=window)
    expected = dense(*(tensor.detach() for tensor in tensors), lengths, window)
    torch.testing.assert_close(got, expected)
    # the gradient against autograd through a masked softmax
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ago = torch.arange(len(row))[:, None] - torch.arange(len(row))
    allowed = (row[:, None] == row[None]) & (ago >= 0) & (ago < (window or len(row)))
    key, value = (tensor.repeat_interleave(4 // kv_heads, 1) for tensor in tensors[1:])
    scores = (tensors[0] @ key.transpose(2, 3) * 0.3).masked_fill(~allowed, float("-inf"))
    masked = (scores.softmax(-1) @ value).transpose(1, 2)
    for ours, theirs in zip(
        torch.autograd.grad((got * factor).sum(), tensors), torch.autograd.grad((masked * factor).sum(), tensors), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=60))
def test_plan_places_every_token_once(lengths: list[int]) -> None:
    plan = plan_attention(lengths, CPU)
    assert sum(rows for rows, _ in plan.shapes) == len(lengths)
    places = sum(rows * longest for rows, longest in plan.shapes)
    if plan.gather is None or plan.restore is None or plan.padding is None:
        assert len(set(lengths)) == 1 and places == sum(lengths)
        return
    assert plan.gather.shape == (places,)
    assert torch.equal(plan.gather[plan.restore], torch.arange(sum(lengths)))
    assert plan.padding.numel() == places - sum(lengths)
    assert places <= sum(lengths) / attention.NEW_GROUP_RATIO + len(plan.shapes) * attention.MIN_GROUP_TOKENS + max(lengths)


def test_groups_are_few() -> None:
    assert len(group_lengths([30, 25, 28, 40] * 4)) == 1
    assert len(group_lengths(list(range(16, 4096, 16)))) < 24


def test_misuse_is_an_error_not_a_wrong_result() -> None:
    tensors = [torch.randn(1, 1, 5, 2) for _ in range(3)]
    module = torch.nn.Module()
    with pytest.raises(EngineError, match="use_remove_padding"):
        packed_attention(module, *tensors, None)
    with pytest.raises(EngineError, match="use_remove_padding"):
        packed_attention(module, *tensors, None, packing=plan_attention([4], CPU))
    for changed in ({"softcap": 50.0}, {"s_aux": torch.zeros(1)}):
        with pytest.raises(EngineError, match=f"asks for {next(iter(changed))}.*use_remove_padding=False"):
            packed_attention(module, *tensors, None, packing=plan_attention([5], CPU), **changed)
    packed_attention(module, *tensors, None, packing=plan_attention([5], CPU), softcap=None)


ALTERNATING = {"layer_types": ["full_attention", "sliding_attention"]}
WINDOWED = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": True, **ALTERNATING}),
    "mistral": (MistralConfig, MistralForCausalLM, {}),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM, {"head_dim": 4, "query_pre_attn_scalar": 7, **ALTERNATING}),
}
"""Models whose layers have windows: some or all of them."""


def kernel_of_rows(q, k, v, bounds_q, bounds_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
    """Stands for CUDA's kernel on rows without padding: one row after the other, with a mask from `window_size`."""
    outs = []
    for first, end in itertools.pairwise(bounds_q.tolist()):
        rows = [tensor[first:end].transpose(0, 1) for tensor in (q, k, v)]
        mask = torch.ones(end - first, end - first, dtype=torch.bool).tril(window_size[1])
        mask = mask if window_size[0] < 0 else mask.triu(-window_size[0])
        outs.append(torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask, scale=scale, enable_gqa=enable_gqa))
    return torch.cat(outs, 1).transpose(0, 1)


@pytest.mark.parametrize("kernel", [False, True], ids=["grouped", "rows without padding"])
@pytest.mark.parametrize("family", WINDOWED)
def test_a_model_with_a_sliding_window_computes_packed_rows_as_rows_alone(
    monkeypatch: pytest.MonkeyPatch, family: str, kernel: bool
) -> None:
    """transformers itself masks the rows alone."""
    if kernel:
        monkeypatch.setattr(attention, "has_kernel", lambda query: True)
        monkeypatch.setattr(attention, "varlen_attn", kernel_of_rows)
        monkeypatch.setattr(attention, "TAKES_GROUPED", True)
    config_class, model_class, options = WINDOWED[family]
    config = config_class(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=3,
        **options,
    )
    torch.manual_seed(0)
    model = model_class(config).double().eval()
    lengths = [7, 2, 5]
    ids = torch.randint(31, (1, sum(lengths)))
    model.set_attn_implementation("sdpa")
    alone = torch.cat([model(row, use_cache=False).logits for row in ids.split(lengths, 1)], 1)
    model.set_attn_implementation(attention.PACKED_ATTENTION)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(ids, position_ids=positions, packing=plan_attention(lengths, CPU), use_cache=False).logits
    torch.testing.assert_close(packed, alone)
    same = torch.randn(packed.shape, dtype=packed.dtype)
    ours, plain = (torch.autograd.grad((same * logits).sum(), list(model.parameters())) for logits in (packed, alone))
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(one, other)
    model.config.sliding_window = None  # the control: without the window the logits are others
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    control = model(ids, position_ids=positions, packing=plan_attention(lengths, CPU), use_cache=False).logits
    assert (control - alone).abs().max() > 1e-3


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("new", [True, False])
def test_the_variable_length_kernel_of_either_torch(monkeypatch: pytest.MonkeyPatch, new: bool, kv_heads: int) -> None:
    """torch 2.11 has no argument for fewer key-value heads than queries, and needs none."""
    calls = []

    def kernel_of_2_13(q, k, v, bounds_q, bounds_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        calls.append((k.shape[1], max_q, max_k, scale, window_size))
        assert enable_gqa == (k.shape[1] < q.shape[1]) and bounds_q is bounds_k
        return q

    def kernel_of_2_11(q, k, v, bounds_q, bounds_k, max_q, max_k, *, scale, window_size):
        calls.append((k.shape[1], max_q, max_k, scale, window_size))
        return q

    kernel = kernel_of_2_13 if new else kernel_of_2_11
    assert attention.takes_grouped(kernel) is new and attention.TAKES_GROUPED is attention.takes_grouped(attention.varlen_attn)
    monkeypatch.setattr(attention, "TAKES_GROUPED", new)
    monkeypatch.setattr(attention, "varlen_attn", kernel)
    query, key = torch.randn(6, 4, 8), torch.randn(6, kv_heads, 8)
    for window in (None, 3):
        assert attention._variable_length(query, key, key, plan_attention([4, 2], CPU), 0.3, window) is query
    assert calls == [(kv_heads, 4, 4, 0.3, (-1, 0)), (kv_heads, 4, 4, 0.3, (2, 0))]


@pytest.mark.parametrize(
    ("capability", "installed", "able", "works", "expected"),
    [
        (9, True, True, True, True),
        (8, True, True, True, False),
        (10, True, True, True, False),
        (9, False, True, True, False),
        (9, True, False, True, False),
        (9, True, True, False, False),
    ],
)
def test_flash_attention_3_is_used_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: int,
    installed: bool,
    able: bool,
    works: bool,
    expected: bool,
) -> None:
    """On Hopper, where the package and the switch are there; a package that does not load is a warning."""
    switched: list[str] = []

    def switch(name: str) -> None:
        if not works:
            raise ImportError("undefined symbol")
        switched.append(name)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: SimpleNamespace() if installed else None)
    if able:
        monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", switch, raising=False)
    else:
        monkeypatch.delattr(torch.nn.attention, "activate_flash_attention_impl", raising=False)
    assert attention.use_flash_attention_3(torch.device("cuda", 0)) is expected
    assert switched == (["FA3"] if expected else []) and ("undefined symbol" in caplog.text) is not works
    assert not attention.use_flash_attention_3(CPU)
