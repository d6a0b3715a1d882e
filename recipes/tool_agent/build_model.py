"""A tiny Qwen2 of random weights that reads and writes characters, with a ChatML template, as a Hugging Face folder.

    python recipes/tool_agent/build_model.py --out outputs/tool_agent/model --seed 1

Printable ASCII characters are tokens; what begins and ends a turn, a tool call and a tool's answer is one token each, so that
calling takes the model few steps.  The text is that of the hermes format: nothing here is special to this recipe.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # recipes are files beside each other, not an installed package

from recipes.tiny_qwen2 import main
from recipes.tool_agent.generate import CALL

PAD, END, UNKNOWN = "<|pad|>", "<|im_end|>", "<|unknown|>"
TURNS = ("<|im_start|>user\n", "<|im_start|>assistant\n")
ANSWER = ("\n<tool_response>\n", "\n</tool_response>")
CHARACTERS = ["\n", *map(chr, range(32, 127))]
MAX_TOKENS = 128
CHAT_TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Characters, turns, calls and their answers."""
    return character_tokenizer([*TURNS, *CALL, *ANSWER])


def character_tokenizer(marks: Iterable[str]) -> PreTrainedTokenizerFast:
    """Characters, and the marks as whole tokens."""
    words = [PAD, END, UNKNOWN, *CHARACTERS]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=MAX_TOKENS,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return tokenizer


if __name__ == "__main__":
    sys.exit(main(None, "Build the tool task's model and tokenizer.", build_tokenizer))
