"""What must lie beside weights for them to load as a Hugging Face model: configuration, generation settings, tokenizer."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from rlhub.config.sections.model import ModelConfig
from rlhub.models.hf import ModelKind
from rlhub.models.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


def save_sidecars(model: ModelConfig, folder: Path, kind: ModelKind = "policy", *, dtype: torch.dtype | None = None) -> None:
    """Write config.json (with the overrides), generation_config.json if the model has one, and the tokenizer's files with
    its chat template into `folder`, which is made.  Call on one rank.

    kind: what the weights are; those of a value or reward model load as a sequence classifier with one label.
    dtype: what the configuration says the weights are, by which transformers loads them; None: as the model's says.
    """
    assert model.path is not None, "checked when the configuration is loaded"
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, **model.override_config)
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    if kind != "policy":
        _as_classifier(config, tokenizer)
    if dtype is not None:
        config.dtype = dtype
    config.save_pretrained(folder)
    try:
        GenerationConfig.from_pretrained(model.path).save_pretrained(folder)
    except OSError:  # the model has no generation settings of its own: then neither has the copy
        (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


def _as_classifier(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """One label, and the padding token by which transformers finds a row's last token."""
    config.num_labels = 1
    config.architectures = [AutoModelForSequenceClassification._model_mapping[type(config)].__name__]
    config.pad_token_id = tokenizer.pad_token_id
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        logger.warning(
            "the tokenizer pads with its end token: transformers' own classifier reads a score at the last token that is no "
            "padding, so before an end token, where rlhub reads it at the end token"
        )
