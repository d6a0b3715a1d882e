"""The token ids a model may produce and those that end its answer."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerBase

from rlhub.config.sections.model import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.tokenizer import load_tokenizer

SHOWN = 4
"""Most tokens that an error lists."""


@dataclass(slots=True, kw_only=True, frozen=True)
class Vocabulary:
    """size: of the model's output layer (it may be larger than the tokenizer's).  stop_token_ids: the tokenizer's end token
    and those of the model's generation settings, as far as the model can write them.  pad_id: fills the space after an answer."""

    size: int
    stop_token_ids: tuple[int, ...]
    pad_id: int


def read_vocabulary(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Vocabulary:
    """From the model's configuration, its generation settings if it has any, and the tokenizer."""
    assert model.path is not None, "checked when the configuration is loaded"
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, **model.override_config)
    size = int(config.get_text_config().vocab_size)
    stops = {int(tokenizer.eos_token_id)}
    try:
        more = GenerationConfig.from_pretrained(model.path).eos_token_id
    except OSError:  # the model has no generation settings
        more = None
    stops |= set(more) if isinstance(more, list) else ({more} - {None})
    written = tuple(sorted(stop for stop in stops if stop < size))
    return Vocabulary(size=size, stop_token_ids=written, pad_id=int(tokenizer.pad_token_id))


def check_tokenizer(model: ModelConfig) -> None:
    """Raise ConfigError naming tokens of the model's tokenizer for which it has no embedding: what they are in would be an index
    error in the middle of a run."""
    path, tokenizer = model.path, load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    size = read_vocabulary(model, tokenizer).size
    beyond = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= size)
    if beyond:
        shown = ", ".join(f"{token!r} = {number}" for number, token in beyond[:SHOWN])
        more = f" and {len(beyond) - SHOWN} more" if len(beyond) > SHOWN else ""
        raise ConfigError(
            f"the tokenizer of {path!r} has ids that its model has no embedding for: {shown}{more}, where vocab_size in "
            f"config.json is {size}; use the tokenizer that the model was made with, or resize the model's embeddings"
        )
