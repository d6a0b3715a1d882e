"""Section `actor_rollout_ref.rollout`: generation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from rlhub.config.schema import Bounds, NonNegativeFloat, PositiveFloat, PositiveInt, PositiveUnitFloat

TopK = Annotated[int, Bounds(ge=-1)]


@dataclass(slots=True, kw_only=True)
class ValSamplingConfig:
    n: PositiveInt = 1
    """Samples per validation prompt; pass@k is reported up to n."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature with do_sample; 0 is greedy."""
    top_p: PositiveUnitFloat = 1.0
    """Nucleus: sample from the smallest set of tokens with this much probability; 1 is off."""
    top_k: TopK = -1
    """Sample from the k most likely tokens; -1 is off."""
    do_sample: bool = False
    """False: greedy, whatever the temperature."""


@dataclass(slots=True, kw_only=True)
class RolloutConfig:
    name: str = "auto"
    """Generation engine: auto (vllm where it is installed, else hf), vllm, hf."""
    mode: Literal["sync"] = "sync"
    """sync: whole batches, in the trainer's own worker processes."""
    n: PositiveInt = 1
    """Samples per prompt; group estimators (grpo, rloo) need 2 or more."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature; log-probs are those of the tempered distribution, in training too."""
    top_p: PositiveUnitFloat = 1.0
    """Nucleus sampling; 1 is off. Below 1 the trainer's log-probs no longer match the sampler's."""
    top_k: TopK = -1
    """Sample from the k most likely tokens; -1 is off. The same caution as top_p."""
    tensor_model_parallel_size: PositiveInt = 1
    """Ranks that share one copy of the engine (vllm); divides the ranks and the attention heads."""
    gpu_memory_utilization: PositiveUnitFloat = 0.5
    """GPU: share of memory for weights and KV cache of the engine."""
    kv_cache_gb: PositiveFloat | None = None
    """CPU: size of the KV cache in GiB; null: from max_num_seqs and the lengths."""
    enforce_eager: bool = False
    """GPU: no CUDA graphs; slower, starts sooner. On CPU always eager."""
    free_cache_engine: bool = True
    """GPU: give the KV cache's memory back during training."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the engine's weights; auto: bfloat16 on CUDA, float32 on CPU."""
    max_num_batched_tokens: PositiveInt = 8192
    """vllm: most tokens in one engine step; without chunked prefill at least max_model_len."""
    max_num_seqs: PositiveInt = 256
    """Most sequences generated at once by an engine."""
    max_model_len: PositiveInt | None = None
    """Longest sequence in tokens; null: max_prompt_length + max_response_length."""
    enable_chunked_prefill: bool = True
    """vllm: mix pieces of long prompts with decoding."""
    enable_prefix_caching: bool = True
    """vllm: share the KV cache of common prefixes, such as the n samples of a prompt; emptied at each weight update."""
    ignore_eos: bool = False
    """Generate max_response_length tokens regardless of end-of-sequence; for benchmarks."""
    update_weights_bucket_mb: PositiveInt = 256
    """MiB of weights moved to the engine at a time; extra memory is at most two buckets."""
    val_kwargs: ValSamplingConfig = field(default_factory=ValSamplingConfig)
    log_prob_micro_batch_size_per_gpu: PositiveInt | None = None
    """Rows in a forward pass for old log-probs; null: the actor's micro-batch."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Cut by tokens; null: as the actor."""
    log_prob_max_token_len_per_gpu: PositiveInt | None = None
    """Most tokens in a forward pass; null: as the actor."""
