"""A tiny Qwen2 of random weights with a tokenizer for sums, as a Hugging Face folder.

    python recipes/arithmetic/build_model.py --out outputs/arithmetic/model --seed 1

Every number, every `+face` and `=` is one token.  The model has 0.5M parameters: attention can look up the next operand,
an MLP can hold the table of additions, and two layers do not suffice to add six dice at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes.arithmetic.generate import LARGEST_NUMBER, NUM_FACES
from recipes.tiny_qwen2 import main

PAD, END, UNKNOWN = "<pad>", "<end>", "<unknown>"
MAX_TOKENS = 64


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


if __name__ == "__main__":
    sys.exit(main(None, "Build the arithmetic task's model and tokenizer.", build_tokenizer))
