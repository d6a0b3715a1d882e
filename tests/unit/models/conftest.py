"""Model folders small enough for unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen2Config


def save_model(path: Path, **changes: object) -> Path:
    values = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(Qwen2Config(**(values | changes))).save_pretrained(path)
    return path


def save_tokenizer(path: Path, **special: str) -> Path:
    words = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="a")), **special).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_model(tmp_path_factory.mktemp("model") / "qwen2")
    save_tokenizer(path, eos_token="<eos>", pad_token="<pad>")
    GenerationConfig(eos_token_id=1, temperature=0.5, do_sample=True).save_pretrained(path)
    return path
