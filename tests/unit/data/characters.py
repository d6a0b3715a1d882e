"""A character-level tokenizer with a chat template, small enough to write expected ids by hand."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] not in ['user', 'assistant', 'system'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "[{{ m['role'][0] }}]{{ m['content'] }}<eos>\n{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)
ALPHABET = "0123456789+=abcdefghijklmnopqrstuvwxyz[] \n"


def character_tokenizer(*, template: str | None = TEMPLATE, pad: bool = True, eos: bool = True) -> PreTrainedTokenizerFast:
    specials = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*specials, *ALPHABET])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        **({"pad_token": "<pad>"} if pad else {}),
        **({"eos_token": "<eos>"} if eos else {}),
    )
    tokenizer.chat_template = template
    return tokenizer
