"""The problems that keep a model from being built with Megatron-core as configured, by its `config.json` alone.

This module loads neither torch nor megatron nor transformers, so the driver can check before any process starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhub.config.sections.training import MegatronConfig
from rlhub.models.shape import expert_layers

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
MOE_TYPES = ("qwen3_moe",)
ROPE_TYPES = ("default", "linear", "llama3")  # the types whose frequencies do not depend on the row's length
DERIVED = {
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_model_parallel_size",
    "context_parallel_size": "context_model_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "expert_tensor_parallel_size": "tensor_model_parallel_size",
    "sequence_parallel": "sequence_parallel",
    "recompute_granularity": "recompute_granularity",
    "params_dtype": "model_dtype",
    "pipeline_dtype": "model_dtype",
    "bf16": "model_dtype",
    "fp16": "model_dtype",
}
"""The entries of Megatron-core's configuration that follow from others, each with the field of MegatronConfig to change
instead."""


def num_virtual_stages(megatron: MegatronConfig) -> int | None:
    """Returns the number of pieces of layers of a pipeline rank; None for one, without interleaving."""
    stages = megatron.virtual_pipeline_model_parallel_size
    return stages if stages is not None and stages > 1 else None


def uses_sequence_parallel(megatron: MegatronConfig) -> bool:
    """Returns whether activations are cut along the tokens, which only tensor parallelism needs."""
    return megatron.tensor_model_parallel_size > 1 and megatron.sequence_parallel is not False


def sparse_layers(values: Mapping[str, Any]) -> list[bool]:
    """Returns for each layer whether its feed-forward part is a mixture of experts."""
    count = int(values["num_hidden_layers"])
    if values["model_type"] not in MOE_TYPES or not num_experts(values):
        return [False] * count
    found = expert_layers(values)
    return [layer in found for layer in range(count)]


def num_experts(values: Mapping[str, Any]) -> int:
    """Returns the number of experts of a layer, under either of its names; 128 is Qwen3-MoE's default."""
    return int(values.get("num_experts", values.get("num_local_experts", 128)))


def megatron_problems(
    values: Mapping[str, Any], megatron: MegatronConfig, world_size: int, *, where: str = "megatron"
) -> list[str]:
    """Returns sentences on all problems; an empty list means that the model can be built.

    values: the content of the model's config.json with the user's overrides.
    world_size: the number of ranks that train the model.
    where: the configuration section that `megatron` was read from.
    """
    known = f"known: {', '.join(MODEL_TYPES)}. Use strategy=fsdp2"
    if values.get("vision_config"):
        return [
            "strategy=megatron does not know models that read images: it has no vision part, no pass that decodes all action "
            f"tokens at their places, and no head for a policy's own values; {known}"
        ]
    if values.get("model_type") not in MODEL_TYPES:
        return [f"strategy=megatron does not know models of type {values.get('model_type')!r}; {known}"]
    found = [*_layout_problems(values, megatron, world_size), *_architecture_problems(values)]
    found += [
        f"override_transformer_config.{name} follows from other settings; set {where}.{DERIVED[name]} instead"
        for name in megatron.override_transformer_config
        if name in DERIVED
    ]
    return [f"{where}: {text}" for text in found]


def _layout_problems(values: Mapping[str, Any], megatron: MegatronConfig, world_size: int) -> Iterator[str]:
    """Yields the problems of the model's sizes with those of the groups of ranks."""
    tensor, pipeline = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    context, experts = megatron.context_model_parallel_size, megatron.expert_model_parallel_size
    stages = num_virtual_stages(megatron)
    ranks = tensor * pipeline * context
    if world_size % ranks:
        yield (
            f"{world_size} ranks cannot be {tensor} tensor x {pipeline} pipeline x {context} context parallel: {ranks} does not "
            f"divide {world_size}; change the sizes or the number of ranks"
        )
    elif (world_size // ranks) % experts:
        yield (
            f"expert_model_parallel_size={experts} does not divide the {world_size // ranks} data-parallel ranks "
            f"({world_size} ranks / {ranks}); change one of them"
        )
    if stages is not None and pipeline == 1:
        yield f"virtual_pipeline_model_parallel_size={stages} needs pipeline_model_parallel_size above 1; unset it"
    layers = int(values["num_hidden_layers"])
    if layers % (pipeline * (stages or 1)):
        yield (
            f"{layers} layers cannot be dealt evenly to {pipeline} pipeline ranks x {stages or 1} pieces: "
            f"choose sizes whose product divides {layers}"
        )
    yield from _head_problems(values, tensor, context)
    if values["model_type"] in MOE_TYPES:
        yield from _expert_problems(values, megatron)
    elif experts > 1:
        yield f"expert_model_parallel_size={experts}, but a {values['model_type']} model has no experts; set it to 1"


def _head_problems(values: Mapping[str, Any], tensor: int, context: int) -> Iterator[str]:
    heads = int(values["num_attention_heads"])
    groups = int(values.get("num_key_value_heads") or heads)
    sizes = {"attention heads": heads, "key-value heads": groups, "intermediate columns": int(values["intermediate_size"])}
    for what, size in sizes.items():
        if size % tensor:
            yield f"tensor_model_parallel_size={tensor} does not divide the model's {size} {what}; choose a divisor of {size}"
        elif what != "intermediate columns" and (size // tensor) % context:
            yield (
                f"context_model_parallel_size={context}: its ranks exchange tokens for heads, and each of the {tensor} "
                f"tensor-parallel ranks has {size // tensor} of the model's {size} {what}; choose a divisor of {size // tensor}"
            )


def _expert_problems(values: Mapping[str, Any], megatron: MegatronConfig) -> Iterator[str]:
    count, ranks = num_experts(values), megatron.expert_model_parallel_size
    tensor, width = megatron.tensor_model_parallel_size, int(values.get("moe_intermediate_size", 768))
    if count % ranks:
        yield f"expert_model_parallel_size={ranks} does not divide the model's {count} experts; choose a divisor of {count}"
    if width % tensor:
        yield f"tensor_model_parallel_size={tensor} does not divide the experts' {width} columns; choose a divisor of {width}"
    if tensor > 1 and megatron.sequence_parallel is False:
        yield "sequence_parallel=False: Megatron-core trains experts under tensor parallelism only with it; leave it unset"
    if int(values.get("num_experts_per_tok", 8)) == 1 and values.get("norm_topk_prob"):
        yield "the normalised weight of a single expert has no gradient, which Megatron-core refuses; use strategy=fsdp2"


def _architecture_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yields the variants of the known architectures that cannot be built."""
    kind = values["model_type"]
    if kind != "qwen2" and values.get("attention_bias"):
        yield "attention_bias=True (a bias on the attention's output, too) is not built with megatron; use strategy=fsdp2"
    if values.get("mlp_bias"):
        yield "mlp_bias=True is not built with megatron; use strategy=fsdp2"
    if values.get("hidden_act", "silu") != "silu":
        yield f"the activation {values['hidden_act']!r} is not built with megatron (silu is); use strategy=fsdp2"
    windows = "sliding_attention" in (values.get("layer_types") or ())
    if windows or (values.get("use_sliding_window") and values.get("layer_types") is None):
        yield "layers with a sliding window are not built with megatron; use strategy=fsdp2"
    rope = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    name = rope.get("rope_type", rope.get("type", "default"))
    if name not in ROPE_TYPES:
        yield f"rotary embeddings of type {name!r} are not built with megatron ({', '.join(ROPE_TYPES)} are); use strategy=fsdp2"
    if rope.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) not in (None, 1, 1.0):
        yield "rotary embeddings of a part of each head are not built with megatron; use strategy=fsdp2"
