"""A part of the vocabulary on each rank: threads stand for the ranks, the FSDP engine's function for the truth."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.engines.training.fsdp import logprob as whole
from rlhub.engines.training.megatron import passes
from rlhub.engines.training.megatron.passes import VocabShard, token_outputs, vocab_shard

TOKENS, WIDTH, VOCAB = 11, 6, 17
NAMES = ("log_probs", "entropy", "sum_pi_squared")


class Exchange:
    """All-reduce between threads, and how often it was used."""

    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.values: list[Tensor] = [torch.empty(0)] * ranks
        self.calls = 0

    def reduce(self, rank: int, values: Tensor, op: Any) -> Tensor:
        self.values[rank] = values.clone()
        self.barrier.wait(60)
        stacked = torch.stack(self.values)
        values.copy_(stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0))
        self.calls += rank == 0
        self.barrier.wait(60)
        return values


def on_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch, function: Callable[[int], Any]) -> tuple[list[Any], int]:
    """(results by rank, collectives a rank made)."""
    exchange, results = Exchange(ranks), [None] * ranks
    monkeypatch.setattr(
        VocabShard,
        "reduce",
        lambda self, values, op=dist.ReduceOp.SUM: exchange.reduce(self.first // self.rows, values, op),
    )
    threads = [threading.Thread(target=lambda r=rank: results.__setitem__(r, function(r))) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results, exchange.calls


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, dtype=dtype) for shape in ((TOKENS, WIDTH), (VOCAB, WIDTH)))
    return hidden, weight, torch.randint(0, VOCAB, (TOKENS,)), torch.randn(2, TOKENS, dtype=dtype)


def truth(hidden: Tensor, weight: Tensor, targets: Tensor, factors: Tensor) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
    leaves = (hidden.clone().requires_grad_(), weight.clone().requires_grad_())
    outputs = whole.token_outputs(leaves[0], leaves[1], None, targets, temperature=0.7, wanted=set(NAMES))
    loss = (factors[0] * outputs["log_probs"]).sum() + (factors[1] * outputs["entropy"]).sum()
    return outputs, torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize(("ranks", "rows"), [(1, 17), (1, 24), (2, 9), (2, 12), (3, 9)])
def test_parts_of_the_vocabulary(monkeypatch: pytest.MonkeyPatch, ranks: int, rows: int, chunk: int) -> None:
    """Values and gradients, with padded columns and (three ranks) a rank that has padding alone."""
    monkeypatch.setattr(passes, "chunk_tokens", lambda *_: chunk)
    hidden, weight, targets, factors = tensors()
    outputs, (d_hidden, d_weight) = truth(hidden, weight, targets, factors)
    padded = torch.cat([weight, torch.randn(ranks * rows - VOCAB, WIDTH, dtype=weight.dtype) * 5])

    def run(rank: int) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        leaves = (hidden.clone().requires_grad_(), padded[rank * rows : (rank + 1) * rows].clone().requires_grad_())
        real = min(max(VOCAB - rank * rows, 0), rows)
        shard = VocabShard(first=rank * rows, rows=rows, real=real, group=None)
        got = token_outputs(leaves[0], leaves[1], targets, shard=shard, temperature=0.7, wanted=set(NAMES))
        loss = (factors[0] * got["log_probs"]).sum() + (factors[1] * got["entropy"]).sum()
        return got, torch.autograd.grad(loss, leaves)

    results, calls = on_ranks(ranks, monkeypatch, run)
    assert calls <= 2 * -(-TOKENS // chunk)
    for got, _ in results:
        for name in NAMES:
            torch.testing.assert_close(got[name], outputs[name], rtol=1e-12, atol=1e-12)
        assert not got["sum_pi_squared"].requires_grad
    torch.testing.assert_close(sum(grads[0] for _, grads in results), d_hidden, rtol=1e-11, atol=1e-12)
    joined = torch.cat([grads[1] for _, grads in results])
    torch.testing.assert_close(joined[:VOCAB], d_weight, rtol=1e-11, atol=1e-12)
    assert (joined[VOCAB:] == 0).all()


def test_padded_columns_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: with padding taken for tokens the numbers are others."""
    hidden, weight, targets, factors = tensors()
    outputs, _ = truth(hidden, weight, targets, factors)
    padded = torch.cat([weight, torch.zeros(3, WIDTH, dtype=weight.dtype)])
    shard = VocabShard(first=0, rows=20, real=20, group=None)
    got = token_outputs(hidden, padded, targets, shard=shard, temperature=0.7, wanted={"log_probs"})
    assert (got["log_probs"] - outputs["log_probs"]).abs().max() > 1e-3


def test_dtypes_and_no_tokens() -> None:
    hidden, weight, targets, _ = tensors(torch.bfloat16)
    shard = vocab_shard(weight, VOCAB, None)
    assert (shard.first, shard.rows, shard.real) == (0, VOCAB, VOCAB)
    outputs = token_outputs(hidden, weight, targets, shard=shard, temperature=1.0, wanted=set(NAMES))
    expected = whole.token_outputs(hidden, weight, None, targets, temperature=1.0, wanted=set(NAMES))
    for name in NAMES:
        assert outputs[name].dtype == torch.float32
        torch.testing.assert_close(outputs[name], expected[name])
    leaf = hidden[:0].requires_grad_()
    empty = token_outputs(leaf, weight, targets[:0], shard=shard, temperature=1.0, wanted={"log_probs"})["log_probs"]
    assert empty.shape == (0,) and empty.requires_grad


def test_entropy_without_its_gradient() -> None:
    """What is reported and not trained on changes no gradient."""
    hidden, weight, targets, factors = tensors()
    grads = []
    for wanted in ({"log_probs"}, {"log_probs", "entropy"}):
        leaf = hidden.clone().requires_grad_()
        outputs = token_outputs(leaf, weight, targets, shard=vocab_shard(weight, VOCAB, None), temperature=0.7, wanted=wanted)
        grads.append(torch.autograd.grad((factors[0] * outputs["log_probs"]).sum(), leaf)[0])
    assert torch.equal(*grads)
