"""vLLM's engine arguments, in this process or in processes of its own.  Imports vLLM: see `environment`."""

from __future__ import annotations

from typing import Any

import psutil
import torch
from transformers import AutoConfig, PreTrainedConfig
from vllm.platforms import current_platform

from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm.internals import cpu_head_widths
from rlhub.errors import EngineError

CPU_BLOCK_TOKENS = 32  # vLLM's CPU attention wants multiples of 32; small blocks let short prompts share a prefix
MIN_CACHE_BYTES = 16 << 20
MAX_CACHE_BYTES = 4 << 30
MEMORY_SHARE = 8  # at most 1/8 of the memory that is free: several ranks start on one machine


def engine_arguments(setup: RolloutSetup, dtype: torch.dtype) -> dict[str, Any]:
    """Returns vLLM's arguments for a model that this platform can run; raises EngineError for another."""
    arguments = _arguments(setup, dtype)
    if current_platform.is_cpu():
        text = _text_config(setup)
        _check_head_width(text)
        _refuse_experts(setup, text)
        arguments.update(
            enforce_eager=True,  # compiling takes a minute and a half here and gains 9 %
            block_size=CPU_BLOCK_TOKENS,
            # After a part of a prompt vLLM sets the seeded generator back, which CPU generators cannot do.
            enable_chunked_prefill=False,
            kv_cache_memory_bytes=_cpu_cache_bytes(setup, text, dtype),
        )
    return arguments


def _arguments(setup: RolloutSetup, dtype: torch.dtype) -> dict[str, Any]:
    config = setup.config
    return {
        "model": setup.model.path,
        "trust_remote_code": setup.model.trust_remote_code,
        "hf_overrides": dict(setup.model.override_config),
        "load_format": "auto" if setup.load_checkpoint else "dummy",
        "dtype": str(dtype).removeprefix("torch."),
        "seed": setup.seed + setup.dp_rank,  # ranks of one tensor-parallel group must agree, replicas must not
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "max_model_len": setup.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, setup.max_model_len, config.max_num_seqs),
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from: what the trainer compares with
        "skip_tokenizer_init": True,  # token in, token out
        "generation_config": "vllm",  # the model folder's sampling defaults must not change the requests
    }


def _text_config(setup: RolloutSetup) -> PreTrainedConfig:
    """The language model's part of the Hugging Face configuration, overrides applied."""
    return AutoConfig.from_pretrained(
        setup.model.path, trust_remote_code=setup.model.trust_remote_code, **setup.model.override_config
    ).get_text_config()


def _check_head_width(text: PreTrainedConfig) -> None:
    """vLLM itself fails only in the first generation, and without naming the model's setting."""
    width, known = _head_width(text), cpu_head_widths()
    if width not in known:
        raise EngineError(
            f"vLLM on CPU has attention for heads of {', '.join(map(str, known))} elements; the model's have {width}: "
            "use rollout.name=hf"
        )


def _refuse_experts(setup: RolloutSetup, text: PreTrainedConfig) -> None:
    """vLLM's CPU kernels take the experts' weights in a layout of their own, made once when the model is loaded."""
    values = text.to_dict()
    if values.get("num_experts") or values.get("num_local_experts"):
        raise EngineError(
            f"vLLM on CPU repacks the experts of {setup.model.path} when it loads them, so they could not be updated: "
            "use rollout.name=hf"
        )


def _cpu_cache_bytes(setup: RolloutSetup, text: PreTrainedConfig, dtype: torch.dtype) -> int:
    """The size of the key-value cache on CPU, where vLLM has no memory budget of its own to fill.

    It holds `max_num_seqs` sequences of full length, within bounds, and never less than two.  A smaller cache than the sequences
    need is correct: vLLM then preempts and recomputes.
    """
    if setup.config.kv_cache_gb is not None:
        return int(setup.config.kv_cache_gb * (1 << 30))
    per_sequence = _bytes_per_token(setup, text, dtype) * CPU_BLOCK_TOKENS * (-(-setup.max_model_len // CPU_BLOCK_TOKENS) + 1)
    wanted = per_sequence * setup.config.max_num_seqs
    ceiling = min(MAX_CACHE_BYTES, int(psutil.virtual_memory().available) // MEMORY_SHARE)
    return max(min(wanted, ceiling), 2 * per_sequence, MIN_CACHE_BYTES)


def _bytes_per_token(setup: RolloutSetup, text: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Keys and values of all layers on one tensor-parallel rank."""
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    local_heads = max(1, heads // setup.config.tensor_model_parallel_size)
    return int(2 * text.num_hidden_layers * local_heads * _head_width(text) * dtype.itemsize)


def _head_width(text: PreTrainedConfig) -> int:
    """Elements of one attention head."""
    return int(text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads)
