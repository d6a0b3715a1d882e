"""What must lie beside weights for them to load as a Hugging Face model: configuration, generation settings, tokenizer."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, GenerationConfig

from rlhub.config.model import ModelConfig
from rlhub.models.tokenizer import load_tokenizer


def save_sidecars(model: ModelConfig, folder: Path) -> None:
    """Write config.json (with the overrides), generation_config.json if the model has one, and the tokenizer's files with
    its chat template into `folder`, which is made.  Call on one rank."""
    assert model.path is not None, "checked when the configuration is loaded"
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, **model.override_config)
    config.save_pretrained(folder)
    try:
        GenerationConfig.from_pretrained(model.path).save_pretrained(folder)
    except OSError:  # the model has no generation settings of its own: then neither has the copy
        (folder / "generation_config.json").unlink(missing_ok=True)
    load_tokenizer(model.path, trust_remote_code=model.trust_remote_code).save_pretrained(folder)
