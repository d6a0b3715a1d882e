"""A tiny Qwen2 of random weights with a tokenizer for sums, as a Hugging Face folder.

    python recipes/arithmetic/build_model.py --out outputs/arithmetic/model --seed 1

Every number, every `+face` and `=` is one token.  The model has 0.5M parameters: attention can look up the next operand,
an MLP can hold the table of additions, and two layers do not suffice to add six dice at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from generate import LARGEST_NUMBER, NUM_FACES
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"
MAX_TOKENS = 64
INITIALIZER_RANGE = 0.06  # 1 / sqrt(2 x hidden size): at Qwen2's own 0.02 a model this narrow takes twice the steps


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the arithmetic task's model and tokenizer.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--seed", type=int, default=1, help="seed of the weights (default: %(default)s)")
    options = parser.parse_args(arguments)
    write_model(options.out, options.seed)
    return 0


def write_model(folder: Path, seed: int) -> None:
    """Weights, configuration and tokenizer that `from_pretrained(folder)` loads."""
    tokenizer = build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(build_config(tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words between spaces are tokens; decoding puts the spaces back."""
    numbers = [str(number) for number in range(LARGEST_NUMBER + 1)]
    addends = [f"+{face}" for face in range(1, NUM_FACES + 1)]
    words = [PAD, END, UNKNOWN, "=", *addends, *numbers]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    """Heads are 32 wide, the smallest that vLLM's CPU attention has; two key-value heads allow two tensor-parallel ranks."""
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


if __name__ == "__main__":
    sys.exit(main())
