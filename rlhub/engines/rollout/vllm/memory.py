"""How large a key-value cache to give vLLM on CPU, where it has no memory budget of its own to fill."""

from __future__ import annotations

import psutil
import torch
from transformers import AutoConfig, PreTrainedConfig

from rlhub.engines.rollout.registry import RolloutSetup

CPU_BLOCK_TOKENS = 32  # vLLM's CPU attention wants multiples of 32; small blocks let short prompts share a prefix
MIN_CACHE_BYTES = 16 << 20
MAX_CACHE_BYTES = 4 << 30
MEMORY_SHARE = 8  # at most 1/8 of the memory that is free: several ranks start on one machine


def cpu_cache_bytes(setup: RolloutSetup, dtype: torch.dtype) -> int:
    """Bytes for `max_num_seqs` sequences of full length, within bounds; never less than two sequences.

    A smaller cache than the sequences need is correct: vLLM then preempts and recomputes.
    """
    if setup.config.kv_cache_gb is not None:
        return int(setup.config.kv_cache_gb * (1 << 30))
    per_sequence = _bytes_per_token(setup, dtype) * CPU_BLOCK_TOKENS * (-(-setup.max_model_len // CPU_BLOCK_TOKENS) + 1)
    wanted = per_sequence * setup.config.max_num_seqs
    ceiling = min(MAX_CACHE_BYTES, psutil.virtual_memory().available // MEMORY_SHARE)
    return max(min(wanted, ceiling), 2 * per_sequence, MIN_CACHE_BYTES)


def _bytes_per_token(setup: RolloutSetup, dtype: torch.dtype) -> int:
    """Keys and values of all layers on one tensor-parallel rank."""
    config = text_config(setup)
    heads = config.to_dict().get("num_key_value_heads") or config.num_attention_heads
    local_heads = max(1, heads // setup.config.tensor_model_parallel_size)
    return 2 * config.num_hidden_layers * local_heads * head_width(config) * dtype.itemsize


def text_config(setup: RolloutSetup) -> PreTrainedConfig:
    """The language model's part of the Hugging Face configuration, overrides applied."""
    return AutoConfig.from_pretrained(
        setup.model.path, trust_remote_code=setup.model.trust_remote_code, **setup.model.override_config
    ).get_text_config()


def head_width(config: PreTrainedConfig) -> int:
    """Elements of one attention head."""
    return config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
