"""The sections of every training engine: the model with its LoRA adapters, the optimizer, and the layout over the ranks.

Actor, reference, critic, reward model and the supervised trainers share them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.config.schema import IntOrOff, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, UnitFloat


@dataclass(slots=True, kw_only=True)
class ModelConfig:
    path: str | None = None
    """Model folder or Hugging Face hub name. Required for the actor."""
    enable_gradient_checkpointing: bool = True
    """Recompute activations in the backward pass: less memory for up to a third more compute. Set it to false for tiny models.
    recompute_granularity of fsdp_config or megatron says how much."""
    use_remove_padding: bool = True
    """Compute on packed rows without padding. Set it to false only if the model's attention cannot be packed."""
    lora_rank: NonNegativeInt = 0
    """Rank of LoRA adapters; 0: train all weights."""
    lora_alpha: PositiveFloat = 16
    """LoRA scale: the adapters' output is multiplied by lora_alpha / lora_rank."""
    target_modules: str | list[str] = "all-linear"
    """Modules that get adapters: all-linear, or a list of module names."""
    lora_adapter_path: str | None = None
    """Folder of an adapter in peft's format (adapter_config.json, adapter_model.safetensors) to start from, such as the folder
    adapter of a checkpoint; null: new adapters. lora_rank, lora_alpha and target_modules must be its own. A reference that is
    the policy with its adapters off stays the base model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Set it only for models whose code you have read."""
    override_config: dict[str, Any] = field(default_factory=dict)
    """Entries of the model's config.json to replace, for example {attention_dropout: 0.0}."""
    vla: dict[str, Any] = field(default_factory=dict)
    """Actions of a vision-language model that is a policy, by the names of VLAConfig (rlhub/config/sections/vla.py), for example
    {chunk: 2, action_dim: 7, bins: 256, first_bin_id: 31744, place_ids: [0]}; empty: a language model."""

    @property
    def policy_kind(self) -> Literal["policy", "vla"]:
        """Returns the kind of model that a policy with this section is."""
        return "vla" if self.vla else "policy"


Strategy = Literal["fsdp", "fsdp2", "megatron"]
"""Training engines; fsdp is another name of fsdp2."""


@dataclass(slots=True, kw_only=True)
class OptimConfig:
    lr: NonNegativeFloat = 1e-6
    """Peak learning rate of AdamW. RL of large models: 1e-6; LoRA or tiny models: 1e-4 and more."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay; norms and biases are exempt."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's two moment decays, each in [0, 1)."""
    eps: PositiveFloat = 1e-8
    """AdamW's denominator offset."""
    lr_warmup_steps: IntOrOff = -1
    """Optimizer steps of linear warm-up; -1: use lr_warmup_steps_ratio."""
    lr_warmup_steps_ratio: UnitFloat = 0.0
    """Warm-up as a fraction of all optimizer steps; read if lr_warmup_steps is -1."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up."""
    min_lr_ratio: UnitFloat = 0.0
    """Learning rate at the end of the cosine, as a fraction of lr."""
    total_training_steps: PositiveInt | None = None
    """Length of the schedule in optimizer steps; null: that of the run."""


@dataclass(slots=True, kw_only=True)
class FSDPConfig:
    param_offload: bool = False
    """Keep parameters in host memory while unused. Set it when GPU memory does not suffice; it costs time."""
    optimizer_offload: bool = False
    """Keep optimizer states in host memory except during the optimizer step. Set it when GPU memory does not suffice; it costs
    time."""
    fsdp_size: IntOrOff = -1
    """Ranks that share one copy of the model; -1: all. A smaller number is hybrid sharding, with further copies on the other
    ranks."""
    model_dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Dtype of the master weights. On GPUs the forward pass computes in bf16 with any of them; fp64 is for tests."""
    recompute_granularity: Literal["auto", "none", "selective", "full"] = "auto"
    """With enable_gradient_checkpointing, recompute whole blocks (full), all but products of matrices and attention (selective:
    half of the memory for little time), or nothing. auto: the least that fits by the memory estimate before the start, on one
    machine with GPUs; elsewhere full."""
    use_torch_compile: bool | None = None
    """Compile each block of the model and the arithmetic of its head, which takes a minute at the start. null: on GPUs."""


@dataclass(slots=True, kw_only=True)
class MegatronConfig:
    """Layout of a model under Megatron-core: ranks = tensor x pipeline x context x data parallel; the experts are divided over
    data-parallel ranks."""

    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share each layer's matrices; divides the attention heads. Keep it inside a machine."""
    pipeline_model_parallel_size: PositiveInt = 1
    """Ranks that share the layers; divides the number of layers."""
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    """Model chunks of a pipeline rank (interleaved schedule): a smaller bubble for more communication; null: one chunk."""
    context_model_parallel_size: PositiveInt = 1
    """Ranks that share the tokens of each micro-batch, for long rows; divides each tensor-parallel rank's heads and key-value
    heads, since attention exchanges tokens for heads."""
    expert_model_parallel_size: PositiveInt = 1
    """Ranks that share the experts of a mixture-of-experts model; divides the experts and the data-parallel ranks."""
    sequence_parallel: bool | None = None
    """Divide activations between tensor-parallel regions along the tokens, which saves memory; null: with tensor parallelism."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer states over the data-parallel ranks, instead of a copy on each."""
    recompute_granularity: Literal["full", "selective"] = "full"
    """With enable_gradient_checkpointing: recompute whole layers, or attention alone (faster, more memory)."""
    param_offload: bool = False
    """Keep parameters in host memory while unused. Set it when GPU memory does not suffice; it costs time."""
    optimizer_offload: bool = False
    """Keep optimizer states in host memory except during the optimizer step. Set it when GPU memory does not suffice; it costs
    time."""
    grad_offload: bool = False
    """Free the gradient buffers between updates. Set it when GPU memory does not suffice; it costs time."""
    model_dtype: Literal["fp32", "bf16"] | None = None
    """Dtype in which the model computes; with bf16 the optimizer keeps fp32 master weights. null: bf16 on GPUs, fp32 on CPU."""
    override_transformer_config: dict[str, Any] = field(default_factory=dict)
    """Entries of Megatron-core's TransformerConfig to replace, by its own names; for users who know it well."""


Section = FSDPConfig | MegatronConfig

SECTIONS: dict[str, type[FSDPConfig] | type[MegatronConfig]] = {
    "fsdp": FSDPConfig,
    "fsdp2": FSDPConfig,
    "megatron": MegatronConfig,
}
"""The section that each training engine reads; it does not read the role's other sections."""


Recompute = Literal["none", "selective", "full"]
"""The part of a block that its backward pass computes again."""


def recompute_of(model: ModelConfig, section: Section) -> Recompute:
    """Returns what an engine with these sections computes again; full where nothing has chosen for `auto`."""
    if not model.enable_gradient_checkpointing:
        return "none"
    return "full" if section.recompute_granularity == "auto" else section.recompute_granularity


def section_of(strategy: str | None, *sections: Section | None) -> Section:
    """Returns the section that a role's engine reads.  strategy: of a derived configuration, and so not None."""
    assert strategy is not None, "derive first"
    return next(section for section in sections if isinstance(section, SECTIONS[strategy]))
