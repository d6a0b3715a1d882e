"""Tiny vision-language models of random weights as Hugging Face folders: a Qwen2.5-VL and a SmolVLM of real architecture, with a
tokenizer of whole words, a chat template and an image processor for pictures of 32 x 32 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForImageTextToText, GenerationConfig, PreTrainedTokenizerFast, Qwen2_5_VLConfig, SmolVLMConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from recipes.tiny_smolvlm import initialize

Architecture = Literal["qwen2_5_vl", "smolvlm"]
IMAGE_SIZE, PATCH, WIDTH = 32, 4, 64
MERGE = 2  # patches of a picture along each axis that become one token: 4 x 4 tokens a picture
MAX_TOKENS = 128
SPECIAL: dict[Architecture, tuple[str, ...]] = {
    "qwen2_5_vl": ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"),
    "smolvlm": ("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>"),
}
PICTURE: dict[Architecture, str] = {"qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>", "smolvlm": "<image>"}
"""What a chat template writes for a picture."""
TEMPLATE = (
    "{%- for message in messages %}<|im_start|>{{ message.role }} "
    "{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{%- if part.type == 'image' %}PICTURE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ eos_token if message.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)


def write_model(folder: Path, seed: int, words: Sequence[str], architecture: Architecture) -> None:
    """Writes weights, configuration, tokenizer, chat template and image processor that `from_pretrained(folder)` loads."""
    tokenizer = build_tokenizer(words, architecture)
    config, processor = _qwen(tokenizer) if architecture == "qwen2_5_vl" else _smolvlm(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        initialize(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)


def build_tokenizer(words: Sequence[str], architecture: Architecture) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of whole words; spaces are left out."""
    special = ("<|im_start|>", "<|im_end|>", *SPECIAL[architecture])
    names = ["<pad>", "<eos>", "<unk>", *special, "user", "assistant", *words]
    core = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    core.pre_tokenizer = Split(Regex(r"\s+"), "removed")
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=list(special),
        model_max_length=MAX_TOKENS,
        chat_template=TEMPLATE.replace("PICTURE", PICTURE[architecture]),
    )


def _text(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_TOKENS,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }


def _qwen(tokenizer: PreTrainedTokenizerFast) -> tuple[Qwen2_5_VLConfig, Any]:
    """Returns a Qwen2.5-VL with one layer of windows and one of full attention in its vision part."""
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(SPECIAL["qwen2_5_vl"]))
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLConfig(
        text_config=_text(tokenizer) | {"rope_parameters": rope},
        vision_config={
            "depth": 2,
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "out_hidden_size": WIDTH,
            "window_size": IMAGE_SIZE // 2,
            "fullatt_block_indexes": [1],
        },
        vision_start_token_id=start,
        image_token_id=image,
        vision_end_token_id=end,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": IMAGE_SIZE**2}
    return config, Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size)


def _smolvlm(tokenizer: PreTrainedTokenizerFast) -> tuple[SmolVLMConfig, Any]:
    """Returns a SmolVLM whose pictures are one tile."""
    config = SmolVLMConfig(
        text_config=_text(tokenizer) | {"model_type": "llama"},
        vision_config={
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": IMAGE_SIZE,
            "patch_size": PATCH,
        },
        scale_factor=MERGE,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    size = {"longest_edge": IMAGE_SIZE}
    return config, SmolVLMImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size)
