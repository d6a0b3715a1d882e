"""Tiny random models on disk, with weights large enough that greedy completions vary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Family = Literal["qwen2", "qwen3", "llama", "qwen3_moe"]
CLASSES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
VOCABULARY = 71  # not a multiple of the padding that vLLM gives the vocabulary
END_OF_SEQUENCE = 2
HEAD_WIDTH = 32  # the smallest that vLLM's CPU attention has
KV_HEADS = {"qwen2": 2, "qwen3": 2, "llama": 1, "qwen3_moe": 2}  # 1: two tensor-parallel ranks hold the same key-value head


def tiny_model(family: Family = "qwen2", *, tied: bool = True, seed: int = 0) -> PreTrainedModel:
    """A random float32 causal language model; biases and norms are random too, so that a lost one is noticed."""
    config_class, model_class = CLASSES[family]
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=4 * HEAD_WIDTH,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS[family],
        head_dim=HEAD_WIDTH,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=END_OF_SEQUENCE,
        pad_token_id=0,
        **(EXPERTS if family == "qwen3_moe" else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def save_tiny_model(folder: Path, family: Family = "qwen2", *, tied: bool = True, seed: int = 0) -> PreTrainedModel:
    """`tiny_model`, also written to `folder`."""
    model = tiny_model(family, tied=tied, seed=seed)
    model.save_pretrained(folder)
    return model


def save_moved_models(configs: Mapping[str, PreTrainedConfig], folder: Path) -> dict[str, str]:
    """Random language models away from the zeros and ones of a fresh one, written below `folder`; returns their folders."""
    for name, config in configs.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        for param in model.parameters():
            param.data.add_(torch.randn_like(param) * 0.1)
        model.save_pretrained(folder / name)
    return {name: str(folder / name) for name in configs}


def full_forward(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits (tokens, vocabulary) in float64.  The mask is given because building it makes transformers import the
    compiler, which takes seconds."""
    mask = torch.full((len(ids), len(ids)), torch.finfo(torch.float32).min).triu(1)[None, None]
    return model(torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0].double()


@torch.no_grad()
def greedy_reference(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities by full forwards over one sequence, without any cache."""
    ids, log_probs = list(prompt), []
    for _ in range(num_tokens):
        row = full_forward(model, ids)[-1].log_softmax(-1)
        ids.append(int(row.argmax()))
        log_probs.append(float(row.max()))
    return ids[len(prompt) :], log_probs


@torch.no_grad()
def greedy_choices(model: PreTrainedModel, prompt: list[int], completion: list[int]) -> tuple[list[int], list[float]]:
    """The likeliest token after the prompt and after every prefix of the completion, with its log-probability, by one full
    forward: these are the completion's own tokens exactly where it is the greedy one."""
    rows = full_forward(model, [*prompt, *completion])[len(prompt) - 1 : -1].log_softmax(-1)
    return rows.argmax(-1).tolist(), rows.max(-1).values.tolist()


@torch.no_grad()
def sequence_log_probs(model: PreTrainedModel, prompt: list[int], completion: list[int], temperature: float) -> list[float]:
    """log pi of the completion's tokens by one full forward, logits divided by the temperature."""
    rows = (full_forward(model, [*prompt, *completion])[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return rows.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
