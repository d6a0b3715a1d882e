"""The baselines: what one would write by hand with transformers, torch and vLLM alone, at equal settings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

CLIP, MAX_NORM = 0.2, 1.0


class BareModel:
    """A Hugging Face model with float32 weights and a fused AdamW; on a GPU it computes in bfloat16 by autocast.

    compiled: the whole model goes through torch.compile.
    train: False has no optimizer.
    """

    def __init__(
        self, folder: Path, device: torch.device, *, checkpointing: bool = False, compiled: bool = False, train: bool = True
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").to(device)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model, self.device = model.train(train), device
        self._call = torch.compile(model) if compiled else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01, fused=True) if train else None

    def log_probs(self, ids: Tensor, width: int) -> Tensor:
        """Returns the log-probs of the last `width` tokens of each row, (rows, width) float32.

        ids: (rows, tokens), without padding.
        """
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            logits = self._call(input_ids=ids, logits_to_keep=width + 1, use_cache=False).logits[:, :-1]
        targets = ids[:, -width:]
        return -cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)

    @torch.no_grad()
    def infer(self, ids: Tensor, width: int, *, rows_per_pass: int) -> Tensor:
        """Returns `log_probs` of all rows on the CPU, a few rows at a time."""
        parts = [self.log_probs(part.to(self.device), width).cpu() for part in ids.split(rows_per_pass)]
        return torch.cat(parts)

    def step(self, ids: Tensor, advantages: Tensor, width: int, *, rows_per_pass: int) -> float:
        """Takes one on-policy step of the clipped policy loss; returns the norm of the gradient.

        ids: (rows, tokens); advantages: (rows, width).
        """
        assert self.optimizer is not None
        for tokens, advantage in zip(ids.split(rows_per_pass), advantages.split(rows_per_pass), strict=True):
            log_probs, advantage = self.log_probs(tokens.to(self.device), width), advantage.to(self.device)
            ratio = (log_probs - log_probs.detach()).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).sum()
            (loss / advantages.numel()).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def response_gradient(model: torch.nn.Module, rows: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    """Returns the gradient of -sum(weights * log pi) over all response tokens, row by row and without padding.

    rows: as uneven_rows returns them.  weights: (rows, response) of the device.
    """
    width = rows["response_mask"].shape[1]
    for row in range(len(weights)):
        real = rows["attention_mask"][row].bool()
        length = int(rows["response_mask"][row].sum())
        ids = rows["input_ids"][row][real][None].to(weights.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, -length - 1 : -1]
        logits = logits if logits.dtype == torch.float64 else logits.float()
        negative = cross_entropy(logits[0], ids[0, -length:], reduction="none")
        (negative * weights[row, :length].to(negative.dtype)).sum().backward()
    assert width == weights.shape[1]
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def bare_generate(llm: object, prompts: Sequence[Sequence[int]], params: object) -> tuple[list[list[int]], float]:
    """Returns the responses of vLLM's LLM.generate and its seconds.  params: one SamplingParams, or one for each prompt."""
    from vllm import TokensPrompt

    start = time.perf_counter()
    inputs = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)  # type: ignore[attr-defined]
    return [list(output.outputs[0].token_ids) for output in outputs], time.perf_counter() - start
