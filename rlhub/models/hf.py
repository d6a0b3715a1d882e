"""Building Hugging Face models for training: policies with a language-model head, value and reward models with a scalar head."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from rlhub.config.sections.model import ModelConfig
from rlhub.errors import ConfigError
from rlhub.models.kinds import SCALAR_HEAD, ModelKind, reward_problem
from rlhub.models.required_weights import check_files, load_checked

__all__ = ["SCALAR_HEAD", "ModelKind", "backbone", "build_model", "check_weights", "load_config", "transformer_layers"]

HEAD_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings by which some models change logits after the head's matrix; log-probs computed without them would be wrong."""


def load_config(model: ModelConfig) -> PreTrainedConfig:
    """The model's configuration with the user's overrides; dropout is off unless overridden.

    Dropout would make the policy being stepped differ from the one whose log-probs were taken.
    """
    if model.path is None:
        raise ConfigError("model.path is not set: name a model folder or a Hugging Face hub model")
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model configuration could be loaded from {model.path!r}: {error}") from error
    known = config.to_dict()
    for name, value in known.items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
    for name, value in model.override_config.items():
        if name not in known:
            raise ConfigError(f"model.override_config.{name}: the configuration of {model.path!r} has no such entry")
        setattr(config, name, value)
    return config


def build_model(
    model: ModelConfig, kind: ModelKind, *, dtype: torch.dtype, attention: str, seed: int, empty: bool = False
) -> PreTrainedModel:
    """A model with the checkpoint's weights in `dtype` on the CPU; `empty`: on the meta device, without weights.

    attention: name of the attention implementation.  seed: of weights the checkpoint lacks (a new value head); the
    process's own random state is left alone.
    """
    config, loader = _config_and_loader(model, kind)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": model.trust_remote_code}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if empty:
            with torch.device("meta"):
                built = loader.from_config(config, **options)
        else:
            built = load_checked(loader, str(model.path), config, kind, **options)
    if kind == "policy":
        _refuse_transformed_logits(built)
    elif not any(name == SCALAR_HEAD for name, _ in built.named_children()):
        raise ConfigError(
            f"{type(built).__name__} has no linear head named {SCALAR_HEAD!r}, so it is no {kind} model; use a decoder-only one"
        )
    # Padding never reaches the model, but a policy may write the padding token: its row has a gradient like any other's.
    built.get_input_embeddings().padding_idx = None
    if model.enable_gradient_checkpointing:
        built.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return built.train()


def check_weights(model: ModelConfig, kind: ModelKind) -> None:
    """Compare the names and shapes in the model's files with what the model is made of, without reading any weight.

    Raises ConfigError naming each tensor or file that is missing, damaged, of another shape, or of another model.
    """
    config, loader = _config_and_loader(model, kind)
    check_files(loader, str(model.path), config, kind, trust_remote_code=model.trust_remote_code)


def _config_and_loader(model: ModelConfig, kind: ModelKind) -> tuple[PreTrainedConfig, Any]:
    """The configuration as this kind has it, and the class of transformers that loads it."""
    config = load_config(model)
    if kind == "reward" and (problem := reward_problem(str(model.path), config.architectures or [], config.num_labels)):
        raise ConfigError(problem)
    if kind == "policy":
        return config, AutoModelForCausalLM
    config.num_labels = 1
    return config, AutoModelForSequenceClassification


def _refuse_transformed_logits(model: PreTrainedModel) -> None:
    values = model.config.get_text_config().to_dict()
    found = [name for name in HEAD_TRANSFORMS if values.get(name) not in (None, 1, 1.0)]
    if found:
        raise ConfigError(
            f"{model.config.model_type} changes its logits after the output layer ({', '.join(found)}), "
            "which the training engine's log-probs do not follow; use another model"
        )


def backbone(model: PreTrainedModel) -> nn.Module:
    """The transformer below the head: token ids to last hidden states."""
    inner: nn.Module = model.base_model
    return inner


def transformer_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, in order: the units of sharding."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]
