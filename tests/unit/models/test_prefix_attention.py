"""Attention over rows that share prefixes: against each row by itself, and what it refuses."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from rlhub.errors import EngineError
from rlhub.models.prefix_attention import attend_prefixes, batch_rows, plan_prefix_attention, prefix_attention

CPU = torch.device("cpu")


def forest(seed: int) -> tuple[list[Tensor], list[int]]:
    """Returns rows as chains of tokens, and how many tokens of each belong to rows before it."""
    draw, chains, shared, count = random.Random(seed), list[Tensor](), list[int](), 0
    for _ in range(draw.randint(1, 9)):
        prefix = draw.choice(chains)[: draw.randint(0, 40)] if chains else torch.empty(0, dtype=torch.int64)
        own = draw.choice([1, 2, 9, 60])
        chains.append(torch.cat([prefix, torch.arange(count, count + own)]))
        shared.append(len(prefix))
        count += own
    return chains, shared


def row_by_row(tensors: list[Tensor], chains: list[Tensor], shared: list[int], window: int | None) -> Tensor:
    """Computes softmax(q k / 2) v of each row with loops over rows only."""
    outs = []
    for chain, prefix in zip(chains, shared, strict=True):
        q, k, v = (tensor[chain].transpose(0, 1) for tensor in tensors)
        k, v = (tensor.repeat_interleave(q.shape[0] // tensor.shape[0], 0) for tensor in (k, v))
        scores = q @ k.transpose(1, 2) / 2
        far = torch.arange(len(chain))[:, None] - torch.arange(len(chain))
        hidden = (far < 0) | (far >= (window or len(chain)))
        outs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)[prefix:])
    return torch.cat(outs)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("mixed", [True, False])
def test_values_and_gradients_are_those_of_rows(seed: int, window: int | None, mixed: bool, monkeypatch) -> None:
    if not mixed:
        monkeypatch.setattr("rlhub.models.prefix_attention.MIXED_SCORES", 0)
    chains, shared = forest(seed)
    count, generator = sum(map(len, chains)) - sum(shared), torch.Generator().manual_seed(seed)
    tensors = [torch.randn(count, heads, 8, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)]
    found = attend_prefixes(*tensors, plan_prefix_attention(chains, shared, CPU), scaling=0.5, window=window)
    expected = row_by_row(tensors, chains, shared, window)
    torch.testing.assert_close(found, expected)
    factor = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    gradients = [torch.autograd.grad((out * factor).sum(), tensors) for out in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_samples_of_a_prompt_are_two_calls() -> None:
    assert batch_rows([400, *[100] * 7], [0, *[300] * 7]) == [[1, 2, 3, 4, 5, 6, 7], [0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"softcap": 30.0}, "softcap"),
        ({"s_aux": torch.zeros(1)}, "s_aux"),
        ({"packing": None}, "no plan"),
    ],
)
def test_refuses_what_it_does_not_compute(options: dict[str, object], message: str) -> None:
    tensors = [torch.zeros(1, 2, 3, 4)] * 3
    plan = plan_prefix_attention([torch.arange(3)], [0], CPU)
    with pytest.raises(EngineError, match=message):
        prefix_attention(torch.nn.Module(), *tensors, None, **({"packing": plan} | options))


def test_the_variable_length_kernel_gets_queries_and_whole_chains() -> None:
    """The kernel needs CUDA; here it is replaced by rows one by one, by the bounds that it is given."""
    chains, shared = forest(3)
    plan, count = plan_prefix_attention(chains, shared, CPU), sum(map(len, chains)) - sum(shared)
    query, key, value = (torch.randn(count, 2, 8) for _ in range(3))
    keys, values = key[plan.chains], value[plan.chains]
    outs = []
    for (first, last), (start, end) in zip(
        zip(plan.query_bounds[:-1], plan.query_bounds[1:], strict=True),
        zip(plan.key_bounds[:-1], plan.key_bounds[1:], strict=True),
        strict=True,
    ):
        q, k, v = (part.transpose(0, 1) for part in (query[first:last], keys[start:end], values[start:end]))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        outs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1))
    torch.testing.assert_close(torch.cat(outs), attend_prefixes(query, key, value, plan))
    assert plan.longest == (int(plan.query_bounds.diff().max()), int(plan.key_bounds.diff().max()))
