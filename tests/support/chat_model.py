"""A tiny random Qwen2 that reads any text: byte-level tokenizer with a chat template, heads wide enough for vLLM on CPU."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, END, TURN = "<pad>", "<end>", "<turn>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<turn>{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)


def save_chat_model(folder: Path, *, max_positions: int = 2048, seed: int = 0) -> Path:
    """Write weights, tokenizer and generation settings to `folder`; returns it."""
    words = [PAD, END, TURN, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, eos_token=END, additional_special_tokens=[TURN], chat_template=CHAT_TEMPLATE
    )
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    return folder
