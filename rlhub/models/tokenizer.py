"""Loading a tokenizer so that padding and stopping mean one thing everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhub.errors import ConfigError

GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


def _loader(path: str) -> Any:
    """The class to load with.  AutoTokenizer follows the model's architecture even where the folder's own files say that
    tokenizer.json is complete in itself, and would then split text by another model's rules."""
    config = Path(path) / "tokenizer_config.json"
    if config.is_file() and json.loads(config.read_text()).get("tokenizer_class") in GENERIC_CLASSES:
        return PreTrainedTokenizerFast
    return AutoTokenizer


def load_tokenizer(path: str | None, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The model's tokenizer, padding on the left, with an end token and a padding token (the end token if it has none).

    Raises ConfigError when there is no tokenizer at `path` or it has no end token.
    """
    if path is None:
        raise ConfigError("model.path is not set: name a model folder or a Hugging Face hub model")
    try:
        tokenizer = _loader(path).from_pretrained(path, trust_remote_code=trust_remote_code, padding_side="left")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no tokenizer could be loaded from {path!r}: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer of {path!r} has no end-of-sequence token: generation could never stop; set eos_token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
