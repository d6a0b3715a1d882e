"""A tiny SmolVLM of random weights as a Hugging Face folder: the embodied recipes' policy, of a vision-language model's real
architecture with 146,000 parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
)

VOCABULARY, WIDTH = 64, 64
IMAGE_TOKEN = "<image>"
SPECIAL = ("<pad>", "<eos>", "<unk>", IMAGE_TOKEN)
IMAGE_SIZE, PATCH, SHUFFLE = 32, 8, 2
TOKENS_PER_IMAGE = (IMAGE_SIZE // PATCH // SHUFFLE) ** 2
EMBEDDING_STD, HEAD_STD = 0.5, 0.02
"""A narrow model learns faster with large embeddings, those of places in the picture too, and a small head than with Hugging
Face's 0.02 everywhere."""
EMBEDDINGS = ("embed_tokens.weight", "position_embedding.weight")


def write_model(folder: Path, seed: int, words: Sequence[str], *, num_places: int, num_bins: int, width: int = WIDTH) -> None:
    """Writes weights, configuration and tokenizer that `from_pretrained(folder)` loads.

    The vocabulary is the special tokens, the words, the places of action tokens and the bins, in this order, filled up to 64 ids.
    """
    tokenizer = build_tokenizer(words, num_places=num_places, num_bins=num_bins)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(build_config(tokenizer, width))
        initialize(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)


def build_tokenizer(words: Sequence[str], *, num_places: int, num_bins: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whole words, with <place0>, ... and <bin0>, ... after the words."""
    names = [*SPECIAL, *words, *(f"<place{i}>" for i in range(num_places)), *(f"<bin{i}>" for i in range(num_bins))]
    names += [f"<spare{i}>" for i in range(VOCABULARY - len(names))]
    core = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=[IMAGE_TOKEN, *(name for name in names if name.startswith(("<place", "<bin")))],
        model_max_length=64,
    )


def build_config(tokenizer: PreTrainedTokenizerFast, width: int = WIDTH) -> SmolVLMConfig:
    """Returns one layer of vision and two of language of that width."""
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    return SmolVLMConfig(
        vision_config={
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH,
        },
        text_config={
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": tokenizer.model_max_length,
            "pad_token_id": pad,
            "eos_token_id": eos,
            "bos_token_id": None,
            "tie_word_embeddings": False,
        },
        scale_factor=SHUFFLE,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        pad_token_id=pad,
        tie_word_embeddings=False,
    )


@torch.no_grad()
def initialize(model: PreTrainedModel) -> None:
    """Draws matrices from N(0, 1 / sqrt(fan-in)), embeddings from N(0, 0.5) and the head from N(0, 0.02); biases are zero."""
    for name, weight in model.named_parameters():
        if weight.dim() >= 2:
            fan_in = weight[0].numel()
            std = EMBEDDING_STD if name.endswith(EMBEDDINGS) else HEAD_STD if "lm_head" in name else 1 / math.sqrt(fan_in)
            weight.normal_(0.0, std)
        elif name.endswith("bias"):
            weight.zero_()
