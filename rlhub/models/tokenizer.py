"""A model's tokenizer, loaded so that padding and stopping mean the same everywhere, and the token ids that the model can
write."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhub.config.sections.training import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.shape import text_config

GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
MAX_LISTED = 4
"""The most tokens that an error lists."""


def load_tokenizer(path: str | None, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Loads the model's tokenizer, which pads on the left and has an end token and a padding token (the end token if it has
    none).

    Raises ConfigError if there is no tokenizer at `path`, or if it has no end token.
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


def _loader(path: str) -> Any:
    """Returns the class that loads the tokenizer.

    AutoTokenizer follows the model's architecture even if the folder's own files declare tokenizer.json complete, and would
    then split text by another model's rules.
    """
    config = Path(path) / "tokenizer_config.json"
    if config.is_file() and json.loads(config.read_text()).get("tokenizer_class") in GENERIC_CLASSES:
        return PreTrainedTokenizerFast
    return AutoTokenizer


@dataclass(slots=True, kw_only=True, frozen=True)
class Vocabulary:
    """The token ids that a model can write.

    size: the size of the model's output layer, which may be larger than the tokenizer's.
    stop_token_ids: the tokenizer's end token and those of the model's generation settings, as far as the model can write them.
    pad_id: fills a row after its answer.
    """

    size: int
    stop_token_ids: tuple[int, ...]
    pad_id: int


def read_vocabulary(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """Reads the model's configuration, its generation settings if it has any, and the tokenizer."""
    assert model.path is not None, "checked when the configuration is loaded"
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, **model.override_config)
    size = int(text_config(config).vocab_size)
    stops = {int(tokenizer.eos_token_id)}
    try:
        more = GenerationConfig.from_pretrained(model.path).eos_token_id
    except OSError:  # the model has no generation settings
        more = None
    stops |= set(more) if isinstance(more, list) else ({more} - {None})
    written = tuple(sorted(stop for stop in stops if stop < size))
    return Vocabulary(size=size, stop_token_ids=written, pad_id=int(tokenizer.pad_token_id))


def check_tokenizer(model: ModelConfig) -> None:
    """Raises ConfigError naming tokens of the tokenizer without an embedding in the model: a row with one would be an index
    error in the middle of a run."""
    path, tokenizer = model.path, load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    size = read_vocabulary(model, tokenizer).size
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= size)
    if beyond:
        shown = ", ".join(f"{token!r} = {number}" for number, token in beyond[:MAX_LISTED])
        more = f" and {len(beyond) - MAX_LISTED} more" if len(beyond) > MAX_LISTED else ""
        raise ConfigError(
            f"the tokenizer of {path!r} has ids that its model has no embedding for: {shown}{more}, where vocab_size in "
            f"config.json is {size}; use the tokenizer that the model was made with, or resize the model's embeddings"
        )
