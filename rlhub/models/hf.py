"""Hugging Face models for training: policies with a language-model head, value and reward models with a scalar head, and the
files that make saved weights a loadable model."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhub.config.sections.training import ModelConfig
from rlhub.config.sections.vla import FLOW, vla_of
from rlhub.errors import ConfigError
from rlhub.models.required_weights import check_files, load_checked
from rlhub.models.shape import POLICIES, SCALAR_HEAD, ModelKind, reward_problem
from rlhub.models.tokenizer import load_tokenizer
from rlhub.models.vision import reads_images
from rlhub.models.vla.flow import check_flow
from rlhub.models.vla.policy import complete
from rlhub.protocol.weights.pieces import FP8, dequantize, num_blocks, quantize

__all__ = [
    "SCALAR_HEAD",
    "ModelKind",
    "backbone",
    "build_model",
    "check_weights",
    "load_config",
    "policy_loader",
    "quantize_projections",
    "save_sidecars",
    "transformer_layers",
]

logger = logging.getLogger(__name__)

HEAD_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""The settings by which some models change logits after the head's matrix; log-probs computed without them would be wrong."""

SCORE_CAP = "attn_logit_softcapping"


def load_config(model: ModelConfig) -> PreTrainedConfig:
    """Loads the model's configuration with the user's overrides; dropout is off unless overridden.

    With dropout, the policy that is stepped would differ from the one whose log-probs were taken.
    """
    if model.path is None:
        raise ConfigError("model.path is not set: name a model folder or a Hugging Face hub model")
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no model configuration could be loaded from {model.path!r}: {error}") from error
    known = config.to_dict()
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for name, value in part.to_dict().items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
                setattr(part, name, 0.0)
    for name, value in model.override_config.items():
        if name not in known:
            raise ConfigError(f"model.override_config.{name}: the configuration of {model.path!r} has no such entry")
        setattr(config, name, value)
    return config


def build_model(
    model: ModelConfig, kind: ModelKind, *, dtype: torch.dtype, attention: str | None, seed: int, empty: bool = False
) -> PreTrainedModel:
    """Builds a model with the checkpoint's weights in `dtype` on the CPU.

    attention: the name of the attention implementation; None for the fastest that computes this model.
    seed: determines weights that the checkpoint lacks (a new value head); the process's random state stays unchanged.
    empty: True builds the model on the meta device, without weights.
    """
    config, loader = _config_and_loader(model, kind)
    attention = attention or _exact_attention(config)
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": model.trust_remote_code}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if empty:
            with torch.device("meta"):
                built = loader.from_config(config, **options)
        else:
            built = load_checked(loader, str(model.path), config, kind, **options)
    _check_head(built, kind)
    vla = vla_of(model) if kind == "vla" else None
    is_flow = vla is not None and vla.decoding == FLOW
    if vla is not None:
        check_flow(built.config, vla) if is_flow else complete(built, vla, model.path)
    # Padding never reaches the model, but a policy may write the padding token: its row has a gradient like any other's.
    built.get_input_embeddings().padding_idx = None
    return built.train()


def _exact_attention(config: PreTrainedConfig) -> str | None:
    """Returns `eager` for a model with capped scores, which sdpa computes without the cap, or None for transformers' choice."""
    return "eager" if getattr(config.get_text_config(), SCORE_CAP, None) else None


def _check_head(built: PreTrainedModel, kind: ModelKind) -> None:
    """Raises ConfigError for a head that the kind of model cannot have."""
    if kind in POLICIES:
        _refuse_transformed_logits(built)
    elif not any(name == SCALAR_HEAD for name, _ in built.named_children()):
        raise ConfigError(
            f"{type(built).__name__} has no linear head named {SCALAR_HEAD!r}, so it is no {kind} model; use a decoder-only one"
        )


def check_weights(model: ModelConfig, kind: ModelKind) -> None:
    """Compares the names and shapes in the model's files with those of the model, without reading any weight.

    Raises ConfigError naming each tensor or file that is missing, damaged, of another shape, or of another model.
    """
    config, loader = _config_and_loader(model, kind)
    check_files(loader, str(model.path), config, kind, trust_remote_code=model.trust_remote_code)


def _config_and_loader(model: ModelConfig, kind: ModelKind) -> tuple[PreTrainedConfig, Any]:
    """Returns the configuration of this kind of model, and the transformers class that loads it."""
    config = load_config(model)
    if kind == "reward" and (problem := reward_problem(str(model.path), config.architectures or [], config.num_labels)):
        raise ConfigError(problem)
    if kind in POLICIES:
        return config, policy_loader(model, config)
    if reads_images(config):
        raise ConfigError(
            f"{model.path!r} is a {config.model_type}, which reads images, and no {kind} model does; use an estimator without a "
            "critic (algorithm.adv_estimator=grpo), or name a text model"
        )
    if model.vla:
        raise ConfigError(f"no {kind} model reads images; for a critic of a policy with model.vla set model.vla.value_head=True")
    config.num_labels = 1
    return config, AutoModelForSequenceClassification


def policy_loader(model: ModelConfig, config: PreTrainedConfig) -> Any:
    """Returns the transformers class that loads the policy of this section."""
    return AutoModelForImageTextToText if model.vla or reads_images(config) else AutoModelForCausalLM


def _refuse_transformed_logits(model: PreTrainedModel) -> None:
    values = model.config.get_text_config().to_dict()
    found = [name for name in HEAD_TRANSFORMS if values.get(name) not in (None, 1, 1.0)]
    if found:
        raise ConfigError(
            f"{model.config.model_type} changes its logits after the output layer ({', '.join(found)}), "
            "which the training engine's log-probs do not follow; use another model"
        )


def backbone(model: PreTrainedModel) -> nn.Module:
    """Returns the transformer below the head, which maps token ids to last hidden states."""
    inner: nn.Module = model.base_model
    return inner


def transformer_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the repeated blocks in order, which are the units of sharding."""
    kinds = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def save_sidecars(model: ModelConfig, folder: Path, kind: ModelKind = "policy", *, dtype: torch.dtype | None = None) -> None:
    """Writes the files without which weights do not load as a Hugging Face model into `folder`, which it creates.

    They are config.json with the overrides, generation_config.json if the model has one, the tokenizer with its chat template,
    and the image processor of a model that reads images.  Call on one rank.

    kind: the kind of model; a value or reward model loads as a sequence classifier with one label.
    dtype: the dtype of the weights, in which transformers loads them; None keeps that of the model's configuration.
    """
    assert model.path is not None, "checked when the configuration is loaded"
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code, **model.override_config)
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    if kind not in POLICIES:
        _as_classifier(config, tokenizer)
    if dtype is not None:
        config.dtype = dtype
    config.save_pretrained(folder)
    try:
        GenerationConfig.from_pretrained(model.path).save_pretrained(folder)
    except OSError:  # the model has no generation settings of its own: then neither has the copy
        (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    if reads_images(config):
        with suppress(OSError):  # a policy of actions reads plain pixels, so its model may have none
            AutoImageProcessor.from_pretrained(model.path).save_pretrained(folder)


def _as_classifier(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Sets one label, and the padding token by which transformers finds a row's last token."""
    config.num_labels = 1
    config.architectures = [AutoModelForSequenceClassification._model_mapping[type(config)].__name__]
    config.pad_token_id = tokenizer.pad_token_id
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        logger.warning(
            "the tokenizer pads with its end token: transformers' own classifier reads a score at the last token that is no "
            "padding, so before an end token, where rlhub reads it at the end token"
        )


class Fp8Linear(nn.Module):
    """A linear layer x -> x W^T + b with W (out, in) in eight bits; see protocol.weights.pieces.

    It dequantizes the matrix for each product, so it needs no kernel and runs on every device.  Its parameters have the names
    of the weight and its scales in a checkpoint.
    """

    def __init__(self, linear: nn.Linear, *, quantized: bool) -> None:
        """Takes the place of a layer.  quantized: False leaves the weight undefined until the first update."""
        super().__init__()
        rows, columns = linear.weight.shape
        if quantized:
            weight, scales = quantize(linear.weight.detach())
        else:
            weight = torch.empty(rows, columns, dtype=FP8, device=linear.weight.device)
            scales = torch.empty(num_blocks(rows), num_blocks(columns), device=linear.weight.device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, dequantize(self.weight, self.weight_scale_inv, x.dtype), self.bias)


def quantize_projections(model: nn.Module, *, quantized: bool) -> None:
    """Puts an Fp8Linear in the place of every projection.  quantized: as in Fp8Linear."""
    found = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and path.endswith("_proj")]
    for path, layer in found:
        model.set_submodule(path, Fp8Linear(layer, quantized=quantized))
