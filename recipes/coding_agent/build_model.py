"""A tiny Qwen2 of random weights that reads the words of the coding task and writes Python, as a Hugging Face folder.

    python recipes/coding_agent/build_model.py --out outputs/coding_agent/model --seed 1

Characters are tokens, and so are the words of the descriptions and what begins and ends a turn.
"""

from __future__ import annotations

import sys
from pathlib import Path

from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes.coding_agent.generate import CLEAR, UNSURE
from recipes.tiny_qwen2 import main
from recipes.tool_agent.build_model import TURNS, character_tokenizer


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, and the words as whole tokens."""
    return character_tokenizer([*TURNS, *(f"{word} " for word in CLEAR), *UNSURE, ", ", "f(", ") is ", "not "])


if __name__ == "__main__":
    sys.exit(main(None, "Build the coding task's model and tokenizer.", build_tokenizer))
