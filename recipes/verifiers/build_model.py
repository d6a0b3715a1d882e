"""A tiny Qwen2 of random weights that reads and writes single characters in a chat, as a Hugging Face folder.

python recipes/verifiers/build_model.py --out outputs/verifiers/model --seed 1
"""

from __future__ import annotations

import string
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes.tiny_qwen2 import main

PAD, END, TURN, UNKNOWN = "<pad>", "<end>", "<turn>", "?"
SPACE = "Ġ"  # of byte-level tokenizers
CHARACTERS = string.ascii_lowercase + string.ascii_uppercase + string.digits + "+-=.,:!?" + SPACE
MAX_TOKENS = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<turn>{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character; any other one is a question mark."""
    words = [PAD, END, TURN, *CHARACTERS]
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges=[], unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[TURN],
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    sys.exit(main(None, "Build the recipe's model and tokenizer.", build_tokenizer))
