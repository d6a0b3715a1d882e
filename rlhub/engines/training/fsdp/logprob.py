"""Log-probabilities, entropy and the sum of squared probabilities straight from hidden states, a chunk of tokens at a time.

The logits of all tokens together are the largest tensor of a training step (tokens x vocabulary).  Here they exist one chunk
at a time: the forward pass keeps three numbers per token, and the backward pass computes each chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}  # logits in memory at one time: 32 and 512 MiB in float32
MIN_CHUNK_TOKENS = 64


def token_outputs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, temperature: float, wanted: AbstractSet[str]
) -> dict[str, Tensor]:
    """Returns the wanted outputs of "log_probs", "entropy" and "sum_pi_squared", (S,) each; see `ChunkedLogProb`.

    temperature: divides the logits; must be positive.
    """
    names = ("log_probs", "entropy", "sum_pi_squared")
    flags = ("entropy" in wanted, "sum_pi_squared" in wanted)
    outputs: tuple[Tensor, ...] = ChunkedLogProb.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, 1.0 / temperature, *flags
    )
    return {name: output for name, output in zip(names, outputs, strict=True) if name in wanted}


class ChunkedLogProb(torch.autograd.Function):
    """Maps hidden (S, D), weight (V, D), bias (V,) or None and targets (S,) to log_probs, entropy and sum_pi_squared, each
    (S,).

    With z = logits / temperature: log_prob = z_y - logsumexp(z); entropy = logsumexp(z) - sum softmax(z) z; sum_pi_squared =
    sum softmax(z)^2, without gradient.  Outputs are float32, or float64 for float64 inputs; outputs that are not wanted are
    zeros.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        inverse_temperature: float,
        want_entropy: bool,
        want_sum_pi_squared: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        count = hidden.shape[0]
        log_probs = torch.zeros(count, dtype=dtype, device=hidden.device)
        entropy, sum_pi_squared, normalizer = (torch.zeros_like(log_probs) for _ in range(3))
        size = chunk_tokens(count, weight.shape[0], hidden.device.type)
        for first in range(0, count, size):
            part = slice(first, first + size)
            logits = _logits(hidden[part], weight, bias, inverse_temperature)
            total = logits.logsumexp(-1)
            log_probs[part] = logits.gather(-1, targets[part, None]).squeeze(-1) - total
            if want_entropy or want_sum_pi_squared:
                p = (logits - total[:, None]).exp_()
                if want_entropy:
                    entropy[part] = total - torch.linalg.vecdot(p, logits)
                if want_sum_pi_squared:
                    sum_pi_squared[part] = torch.linalg.vecdot(p, p)
            normalizer[part] = total
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.inverse_temperature, ctx.size = inverse_temperature, size
        ctx.set_materialize_grads(False)  # an entropy that is only reported has no gradient, and then costs none
        ctx.mark_non_differentiable(sum_pi_squared)
        return log_probs, entropy, sum_pi_squared

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Computes the gradients from d log_prob / dz = onehot - p and d entropy / dz = -p (log p + entropy)."""
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        grad_entropy = grads[1]
        grad_log_probs = torch.zeros_like(normalizer) if grads[0] is None else grads[0]
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=normalizer.dtype) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=normalizer.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        for first in range(0, hidden.shape[0], ctx.size):
            part = slice(first, first + ctx.size)
            log_p = _logits(hidden[part], weight, bias, ctx.inverse_temperature).sub_(normalizer[part, None])
            if grad_entropy is not None:
                d_logits = log_p.exp()
                log_p.add_(entropy[part, None]).mul_(grad_entropy[part, None]).add_(grad_log_probs[part, None])
                d_logits.mul_(log_p).neg_()
            else:
                d_logits = log_p.exp_().mul_(grad_log_probs[part, None]).neg_()
            d_logits.scatter_add_(-1, targets[part, None], grad_log_probs[part, None])
            if ctx.inverse_temperature != 1.0:
                d_logits.mul_(ctx.inverse_temperature)
            if d_bias is not None:
                d_bias.add_(d_logits.sum(0))
            d_logits = d_logits.to(hidden.dtype)  # half-precision products on GPUs; nothing on others
            if d_weight is not None:
                d_weight += d_logits.t() @ hidden[part]
            if d_hidden is not None:
                d_hidden[part] = d_logits @ weight
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None or bias is None else d_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def chunk_tokens(num_tokens: int, vocab_size: int, device_type: str = "cpu") -> int:
    """Returns the tokens per chunk: within CHUNK_ELEMENTS, and at most half of all, so that the whole never exists at once."""
    fitting = max(CHUNK_ELEMENTS.get(device_type, 1 << 23) // max(vocab_size, 1), MIN_CHUNK_TOKENS)
    return max(min(fitting, (num_tokens + 1) // 2), 1)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, inverse_temperature: float) -> Tensor:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if logits.dtype in (torch.float16, torch.bfloat16):
        logits = logits.float()
    return logits if inverse_temperature == 1.0 else logits.mul_(inverse_temperature)
