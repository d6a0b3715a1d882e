"""Megatron-core's TransformerConfig for a Hugging Face model: dense Llama, Qwen2 and Qwen3, and Qwen3's mixture of experts."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import rlhub.models.megatron.compat  # noqa: F401 - before megatron, which it imports quietly

# isort: split
import torch
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rlhub.config.sections.training import MegatronConfig
from rlhub.errors import ConfigError
from rlhub.models.megatron.checks import num_experts, num_virtual_stages, sparse_layers, uses_sequence_parallel
from rlhub.registry import suggest

ADVICE = ("If you are using transformer_engine as the transformer implementation", "full scope is deprecated")
"""The beginnings of Megatron's warnings about kernels that are not used here, and about its own defaults."""


def make_transformer_config(
    hf_config: PreTrainedConfig,
    megatron: MegatronConfig,
    *,
    dtype: torch.dtype,
    recompute: bool,
    expert_tensor_parallel_size: int | None = None,
) -> TransformerConfig:
    """Returns the configuration of the settings with the user's overrides.  Call it only if `megatron_problems` has found
    nothing.

    recompute: True recomputes activations in the backward pass, as many as `recompute_granularity` says.
    expert_tensor_parallel_size: the ranks that share each expert's matrices; None takes those that share any layer's.
    """
    values = hf_config.to_dict()
    settings = {
        **_architecture(hf_config, values),
        **_layout(megatron),
        **_experts(values, megatron, expert_tensor_parallel_size),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "perform_initialization": False,  # every weight is read or drawn afterwards
    }
    if recompute:
        settings["recompute_granularity"] = megatron.recompute_granularity
        if megatron.recompute_granularity == "full":
            settings |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for name in megatron.override_transformer_config:
        if name not in known:
            raise ConfigError(
                f"override_transformer_config.{name}: Megatron-core's TransformerConfig has no such entry{suggest(name, known)}"
            )
    return _checked(settings | megatron.override_transformer_config)


def _checked(settings: dict[str, Any]) -> TransformerConfig:
    """Builds the configuration; an error of Megatron's own checks becomes a ConfigError."""
    try:
        with warnings.catch_warnings():
            for message in ADVICE:
                warnings.filterwarnings("ignore", message=message)
            return TransformerConfig(**settings)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"Megatron-core refuses this configuration: {error}") from error


def _architecture(hf_config: PreTrainedConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Returns the sizes and variants of the layers."""
    return {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": values.get("num_key_value_heads") or hf_config.num_attention_heads,
        "kv_channels": head_width(hf_config),
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf_config.model_type == "qwen2",
        "qk_layernorm": hf_config.model_type.startswith("qwen3"),
        "hidden_dropout": 0.0,  # as in rlhub.models.hf.load_config
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,  # kernels of Apex
        "persist_layer_norm": False,
    }


def _layout(megatron: MegatronConfig) -> dict[str, Any]:
    """Returns the settings by which ranks share the model."""
    return {
        "tensor_model_parallel_size": megatron.tensor_model_parallel_size,
        "pipeline_model_parallel_size": megatron.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": num_virtual_stages(megatron),
        "context_parallel_size": megatron.context_model_parallel_size,
        "expert_model_parallel_size": megatron.expert_model_parallel_size,
        "sequence_parallel": uses_sequence_parallel(megatron),
        "variable_seq_lengths": megatron.pipeline_model_parallel_size > 1,  # packed micro-batches differ in their tokens
        "moe_token_dispatcher_type": "alltoall",  # which variable lengths ask for, experts or not
        # With several pieces on each of two ranks, each is the other's next and previous: messages forward and back go apart.
        "overlap_p2p_comm": num_virtual_stages(megatron) is not None,
        "batch_p2p_comm": num_virtual_stages(megatron) is None,
    }


def _experts(values: dict[str, Any], megatron: MegatronConfig, expert_tensor_parallel_size: int | None) -> dict[str, Any]:
    """Returns the settings of a mixture of experts that compute as the Hugging Face model does: every token reaches its
    experts, the router works in float32, and there is no auxiliary loss."""
    sparse = sparse_layers(values)
    if not any(sparse):
        return {}
    tensor = megatron.tensor_model_parallel_size
    return {
        "num_moe_experts": num_experts(values),
        "moe_ffn_hidden_size": values["moe_intermediate_size"],
        "moe_layer_freq": [int(layer) for layer in sparse],
        "moe_router_topk": values["num_experts_per_tok"],
        "moe_router_pre_softmax": not values["norm_topk_prob"],  # the softmax of the chosen is the normalised softmax of all
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "expert_tensor_parallel_size": tensor if expert_tensor_parallel_size is None else expert_tensor_parallel_size,
    }


def head_width(hf_config: PreTrainedConfig) -> int:
    """Returns the number of elements of an attention head."""
    return int(hf_config.to_dict().get("head_dim") or hf_config.hidden_size // hf_config.num_attention_heads)


def rotary_frequencies(hf_config: PreTrainedConfig) -> Tensor:
    """Returns the radians by which one position turns each pair of a head's elements, (width / 2,) float32."""
    kind = hf_config.rope_parameters.get("rope_type", "default")
    if kind != "default":
        frequencies: Tensor
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
        assert scale == 1.0, f"rotary embeddings of type {kind} scale the scores"
        return frequencies.float()
    width = head_width(hf_config)
    base: float = hf_config.rope_parameters["rope_theta"]
    return 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
