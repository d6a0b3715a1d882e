"""Log-probabilities, entropy and the sum of squared probabilities straight from hidden states, a chunk of tokens at a time.

The logits of all tokens together are the largest tensor of a training step (tokens x vocabulary).  Here they exist one chunk
at a time: the forward pass keeps three numbers per token, and the backward pass computes each chunk's logits again and adds its
product to the gradient of the head in place.

A chunk is one product of matrices and the arithmetic on its logits.  Compiled, that arithmetic is one or two kernels over logits
in the product's own dtype (Triton's on CUDA), where torch's own operations pass over float32 logits 8 times forward and 16 times
backward.  Libraries of kernels for this layer give a loss, or no gradient of the entropy, and are not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}  # logits in memory at one time: 32 and 512 MiB in float32
MIN_CHUNK_TOKENS = 64


def token_outputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    wanted: AbstractSet[str],
    compiled: bool = False,
) -> dict[str, Tensor]:
    """Returns the wanted outputs of "log_probs", "entropy" and "sum_pi_squared", (S,) each; see `ChunkedLogProb`.

    temperature: divides the logits; must be positive.
    compiled: True compiles the arithmetic of a chunk.
    """
    names = ("log_probs", "entropy", "sum_pi_squared")
    asked = ("entropy" in wanted, "sum_pi_squared" in wanted)
    outputs: tuple[Tensor, ...] = ChunkedLogProb.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, 1.0 / temperature, asked, compiled
    )
    return {name: output for name, output in zip(names, outputs, strict=True) if name in wanted}


class ChunkedLogProb(torch.autograd.Function):
    """Maps hidden (S, D), weight (V, D), bias (V,) or None and targets (S,) to log_probs, entropy and sum_pi_squared, each
    (S,).

    With z = logits / temperature: log_prob = z_y - logsumexp(z); entropy = logsumexp(z) - sum softmax(z) z; sum_pi_squared =
    sum softmax(z)^2, without gradient.  Outputs are float32, or float64 for float64 inputs; outputs that are not wanted are
    zeros.  asked: whether entropy and sum_pi_squared are wanted.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_temperature: float,
        asked: tuple[bool, bool],
        compiled: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        count = hidden.shape[0]
        log_probs = torch.zeros(count, dtype=dtype, device=hidden.device)
        entropy, sum_pi_squared, normalizer = (torch.zeros_like(log_probs) for _ in range(3))
        size = chunk_tokens(count, weight.shape[0], hidden.device.type)
        compute: Callable[..., Any] = _compiled(chunk_outputs) if compiled else chunk_outputs
        for first in range(0, count, size):
            part = slice(first, first + size)
            found = compute(hidden[part], weight, bias, targets[part], inverse_temperature, *asked)
            for whole, value in zip((log_probs, normalizer, entropy, sum_pi_squared), found, strict=True):
                if value is not None:
                    whole[part] = value
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.inverse_temperature, ctx.size, ctx.compiled = inverse_temperature, size, compiled
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient, and then costs none
        ctx.mark_non_differentiable(sum_pi_squared)
        return log_probs, entropy, sum_pi_squared

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Adds up the gradients of the chunks; see `chunk_gradient`."""
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        grad_log_probs = torch.zeros_like(normalizer) if grads[0] is None else grads[0]
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=normalizer.dtype) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=normalizer.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        compute: Callable[..., Any] = _compiled(chunk_gradient) if ctx.compiled else chunk_gradient
        for first in range(0, hidden.shape[0], ctx.size):
            part = slice(first, first + ctx.size)
            of_entropy = None if grads[1] is None else (grads[1][part], entropy[part])
            numbers = (targets[part], normalizer[part], grad_log_probs[part], of_entropy)
            d_logits, d_chunk_bias = compute(hidden[part], weight, bias, *numbers, ctx.inverse_temperature)
            if d_bias is not None:
                d_bias.add_(d_chunk_bias)
            if d_weight is not None:
                add_product(d_weight, d_logits.t(), hidden[part])
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[part])
            del d_logits, d_chunk_bias  # else they are there with the next chunk's logits
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
            *(None,) * 4,
        )


def chunk_outputs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    inverse_temperature: float,
    want_entropy: bool,
    want_sum_pi_squared: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns log_probs, logsumexp(z), entropy and sum_pi_squared of a chunk's tokens, None for what is not wanted."""
    logits = _logits(hidden, weight, bias, inverse_temperature)
    total = logits.logsumexp(-1)
    log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - total
    entropy = squares = None
    if want_entropy or want_sum_pi_squared:
        p = (logits - total[:, None]).exp_()
        squares = torch.linalg.vecdot(p, p) if want_sum_pi_squared else None
        entropy = total - p.mul_(logits).sum(-1) if want_entropy else None
    return log_probs, total, entropy, squares


def chunk_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    normalizer: Tensor,
    grad_log_probs: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    inverse_temperature: float,
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradient of a chunk's logits before the division by the temperature, in the dtype of `hidden`, and that of the
    bias; from d log_prob / dz = onehot - p and d entropy / dz = -p (log p + entropy).

    of_entropy: the gradient of the entropy, and the entropy; None without.
    """
    log_p = _logits(hidden, weight, bias, inverse_temperature).sub_(normalizer[:, None])
    if of_entropy is not None:
        grad_entropy, entropy = of_entropy
        d_logits = log_p.exp()
        log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_log_probs[:, None])
        d_logits.mul_(log_p).neg_()
    else:
        d_logits = log_p.exp_().mul_(grad_log_probs[:, None]).neg_()
    d_logits.scatter_add_(-1, targets[:, None], grad_log_probs[:, None])
    if inverse_temperature != 1.0:
        d_logits.mul_(inverse_temperature)
    # Half-precision products on GPUs; the conversion is nothing on others.
    return d_logits.to(hidden.dtype), None if bias is None else d_logits.sum(0)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function compiled: at its second size once more, for tokens of any number."""
    return torch.compile(function)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total` in place.

    A half-precision product is added in float32 by the product's own kernel where torch has one; otherwise it is a tensor of its
    own, of half the size of the total.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _adds_in_float32(total.device, left.dtype):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(left @ right)


@functools.cache
def _adds_in_float32(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether a half-precision product can be added to a float32 matrix in place, and is then right."""
    left, total = torch.eye(16, device=device, dtype=dtype), torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, left, left, out_dtype=total.dtype, out=total)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(total, 1 + left.float())


def chunk_tokens(num_tokens: int, vocab_size: int, device_type: str = "cpu") -> int:
    """Returns the tokens per chunk: within CHUNK_ELEMENTS, and at most half of all, so that the whole never exists at once."""
    fitting = max(CHUNK_ELEMENTS.get(device_type, 1 << 23) // max(vocab_size, 1), MIN_CHUNK_TOKENS)
    return max(min(fitting, (num_tokens + 1) // 2), 1)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, inverse_temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return logits if inverse_temperature == 1.0 else logits.mul_(inverse_temperature)
