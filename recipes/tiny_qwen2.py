"""The recipes' model: a tiny Qwen2 of random weights, as a Hugging Face folder with the tokenizer of a task."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

INITIALIZER_RANGE = 0.06  # 1 / sqrt(2 x hidden size): at Qwen2's own 0.02 a model this narrow takes twice the steps


def main(arguments: Sequence[str] | None, description: str, build_tokenizer: Callable[[], PreTrainedTokenizerFast]) -> int:
    """The command that writes a task's folder; returns the exit status."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights (default: %(default)s)")
    options = parser.parse_args(arguments)
    write_model(options.out, options.seed, build_tokenizer())
    return 0


def write_model(folder: Path, seed: int, tokenizer: PreTrainedTokenizerFast) -> None:
    """Weights, configuration and tokenizer that `from_pretrained(folder)` loads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(build_config(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    """Heads are 32 wide, the smallest that vLLM's CPU attention has; two key-value heads allow two tensor-parallel ranks."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
