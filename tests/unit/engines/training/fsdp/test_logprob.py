from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlhub.engines.training.fsdp import logprob
from rlhub.engines.training.fsdp.logprob import chunk_tokens, token_outputs
from tests.support.memory import peak_allocation

TOKENS, WIDTH, VOCAB = 11, 6, 17


def reference(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T + (0 if bias is None else bias)
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def log_probs_and_entropy(*args, temperature: float, want_entropy: bool) -> tuple[Tensor, Tensor]:
    outputs = token_outputs(*args, temperature=temperature, wanted={"log_probs", "entropy"} if want_entropy else {"log_probs"})
    return outputs["log_probs"], outputs.get("entropy", torch.zeros_like(outputs["log_probs"]))


def inputs(bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    return make(TOKENS, WIDTH), make(VOCAB, WIDTH), make(VOCAB) if bias else None, torch.randint(0, VOCAB, (TOKENS,))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, bias: bool, entropy: bool, temperature: float, chunk: int) -> None:
    monkeypatch.setattr(logprob, "chunk_tokens", lambda *_: chunk)
    hidden, weight, offset, targets = inputs(bias)
    leaves = [leaf for leaf in (hidden, weight, offset) if leaf is not None]
    factors = torch.randn(2, TOKENS, dtype=torch.float64)
    if not entropy:
        factors[1] = 0
    results = []
    for function in (reference, log_probs_and_entropy):
        options = {"temperature": temperature} if function is reference else {"temperature": temperature, "want_entropy": entropy}
        out = function(hidden, weight, offset, targets, **options)
        loss = (factors[0] * out[0]).sum() + ((factors[1] * out[1]).sum() if entropy else 0)
        results.append((out, torch.autograd.grad(loss, leaves)))
    (expected, expected_grads), (got, grads) = results
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1] if entropy else torch.zeros_like(expected[1]))
    for ours, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("also", [set(), {"log_probs", "entropy"}])
def test_sum_of_squared_probabilities(monkeypatch: pytest.MonkeyPatch, also: set[str], chunk: int) -> None:
    """It equals the whole softmax's, whatever else is asked, and carries no gradient."""
    monkeypatch.setattr(logprob, "chunk_tokens", lambda *_: chunk)
    hidden, weight, bias, targets = inputs(True)
    outputs = token_outputs(hidden, weight, bias, targets, temperature=0.6, wanted=also | {"sum_pi_squared"})
    assert set(outputs) == also | {"sum_pi_squared"}
    softmax = ((hidden @ weight.T + bias) / 0.6).softmax(-1)
    torch.testing.assert_close(outputs["sum_pi_squared"], softmax.square().sum(-1), rtol=1e-12, atol=1e-14)
    assert not outputs["sum_pi_squared"].requires_grad
    wrong = (hidden @ weight.T + bias).softmax(-1).square().sum(-1)  # the control: without the temperature
    assert (outputs["sum_pi_squared"] - wrong).abs().max() > 1e-3


def test_the_gradient_is_the_same_beside_the_sum_of_squares() -> None:
    hidden, weight, _, targets = inputs(False)
    grads = []
    for extra in (set(), {"sum_pi_squared"}):
        outputs = token_outputs(hidden, weight, None, targets, temperature=1.0, wanted={"log_probs", "entropy"} | extra)
        grads.append(torch.autograd.grad((outputs["log_probs"] * 0.3 + outputs["entropy"]).sum(), (hidden, weight)))
    for plain, beside in zip(*grads, strict=True):
        assert torch.equal(plain, beside)


def test_entropy_alone_has_a_gradient() -> None:
    hidden, weight, _, targets = inputs(False)
    _, got = log_probs_and_entropy(hidden, weight, None, targets, temperature=1.0, want_entropy=True)
    _, expected = reference(hidden, weight, None, targets, 1.0)
    for ours, theirs in zip(
        torch.autograd.grad(got.sum(), (hidden, weight)), torch.autograd.grad(expected.sum(), (hidden, weight)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_large_logits_stay_finite() -> None:
    hidden, weight, _, targets = inputs(False)
    for out in log_probs_and_entropy(hidden * 1e4, weight, None, targets, temperature=1.0, want_entropy=True):
        assert out.isfinite().all()


def test_no_targets_still_connect_to_the_weights() -> None:
    hidden, weight, _, targets = inputs(False)
    log_probs, _ = log_probs_and_entropy(hidden[:0], weight, None, targets[:0], temperature=1.0, want_entropy=True)
    grads = torch.autograd.grad(log_probs.sum(), (hidden, weight))
    assert all(not grad.any() for grad in grads)


@pytest.mark.parametrize(("tokens", "vocab"), [(1, 5), (2, 5), (100, 10), (100_000, 150_000), (0, 5)])
def test_chunks_are_never_the_whole(tokens: int, vocab: int) -> None:
    size = chunk_tokens(tokens, vocab)
    assert size >= 1 and (size < tokens or tokens < 2)
    assert size * vocab <= max(logprob.CHUNK_ELEMENTS["cpu"], logprob.MIN_CHUNK_TOKENS * vocab)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk", [10, 40])
def test_the_memory_is_that_of_two_chunks_and_the_gradients(monkeypatch: pytest.MonkeyPatch, chunk: int, compiled: bool) -> None:
    """However many tokens there are; the control is the plain way, which keeps the logits of all tokens."""
    if compiled:
        monkeypatch.setattr(logprob, "_compiled", lambda function: torch.compile(function, backend="aot_eager"))
    monkeypatch.setattr(logprob, "chunk_tokens", lambda *_: chunk)
    tokens, width, vocabulary = 400, 4, 3000
    hidden, weight = torch.randn(tokens, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))

    def run() -> None:
        outputs = token_outputs(
            hidden, weight, None, targets, temperature=0.7, wanted={"log_probs", "entropy"}, compiled=compiled
        )
        (outputs["log_probs"].sum() + outputs["entropy"].sum()).backward()
        hidden.grad = weight.grad = None

    def plainly() -> None:
        log_probs, entropy = reference(hidden, weight, None, targets, 0.7)
        (log_probs.sum() + entropy.sum()).backward()

    run()  # compiles
    bound = 4 * ((2 if not compiled else 5) * chunk * vocabulary + 1.1 * vocabulary * width + 20 * tokens)
    assert chunk * vocabulary < peak_allocation(run) <= bound
    assert peak_allocation(plainly) > 4 * tokens * vocabulary > bound


def test_compiled_chunks_are_the_plain_ones_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tokens of any number, and nothing left to the interpreter; against the whole softmax in float64."""
    monkeypatch.setattr(logprob, "_compiled", lambda function: torch.compile(function, backend="aot_eager", fullgraph=True))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    for tokens in (TOKENS, 40, 27, 100, 64):
        hidden, targets = torch.randn(tokens, WIDTH, requires_grad=True), torch.randint(0, VOCAB, (tokens,))
        results = []
        for compiled, dtype in ((True, torch.float32), (False, torch.float64)):
            leaves = hidden.detach().to(dtype).requires_grad_(), weight.detach().to(dtype).requires_grad_()
            outputs = token_outputs(*leaves, None, targets, temperature=0.6, wanted={"log_probs", "entropy"}, compiled=compiled)
            factors = torch.linspace(-1, 1, tokens, dtype=dtype)
            loss = (factors * outputs["log_probs"]).sum() - 0.1 * outputs["entropy"].sum()
            results.append([outputs["log_probs"], outputs["entropy"], *torch.autograd.grad(loss, leaves)])
        for ours, plain in zip(*results, strict=True):
            torch.testing.assert_close(ours.double(), plain, rtol=1e-5, atol=1e-5)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6  # two functions: of one size, of any, and further on


def test_products_add_up_in_place() -> None:
    total, left, right = torch.randn(7, 5), torch.randn(7, 3), torch.randn(3, 5)
    expected, memory = total + left @ right, total.data_ptr()
    assert peak_allocation(lambda: logprob.add_product(total, left, right)) == 0
    torch.testing.assert_close(total, expected)
    logprob.add_product(total, left.bfloat16(), right.bfloat16())
    torch.testing.assert_close(total, expected + left.bfloat16() @ right.bfloat16())
    assert total.data_ptr() == memory and total.dtype == torch.float32
