"""A tiny Qwen2 of random weights that reads and writes characters, with a ChatML template, as a Hugging Face folder.

    python recipes/tool_agent/build_model.py --out outputs/tool_agent/model --seed 1

Printable ASCII characters are tokens; what begins and ends a turn, a tool call and a tool's answer is one token each, so that
calling takes the model few steps.  The text is that of the hermes format: nothing here is special to this recipe.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from generate import CALL
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, END, UNKNOWN = "<|pad|>", "<|im_end|>", "<|unknown|>"
TURNS = ("<|im_start|>user\n", "<|im_start|>assistant\n")
ANSWER = ("\n<tool_response>\n", "\n</tool_response>")
CHARACTERS = ["\n", *map(chr, range(32, 127))]
MAX_TOKENS = 128
INITIALIZER_RANGE = 0.06  # 1 / sqrt(2 x hidden size): at Qwen2's own 0.02 a model this narrow takes twice the steps
CHAT_TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the folder; returns the exit status."""
    parser = argparse.ArgumentParser(description="Build the tool task's model and tokenizer.")
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
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)


def build_tokenizer() -> PreTrainedTokenizerFast:
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
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in (*TURNS, *CALL, *ANSWER)])
    return tokenizer


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
