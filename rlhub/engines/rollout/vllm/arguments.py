"""What vLLM is built with, in this process or in processes of its own.  Imports vLLM: see `environment`."""

from __future__ import annotations

from typing import Any

import torch
import vllm._custom_ops as vllm_custom_ops
from vllm.model_executor.layers import utils as vllm_layer_utils
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm.memory import CPU_BLOCK_TOKENS, cpu_cache_bytes, head_width, text_config
from rlhub.errors import EngineError


def engine_arguments(setup: RolloutSetup, dtype: torch.dtype) -> dict[str, Any]:
    """For a model that this platform can run; raises EngineError for another."""
    arguments = _arguments(setup, dtype)
    if current_platform.is_cpu():
        arguments.update(
            enforce_eager=True,  # compiling takes a minute and a half here and gains 9 %
            block_size=CPU_BLOCK_TOKENS,
            # After a part of a prompt vLLM sets the seeded generator back, which CPU generators cannot do.
            enable_chunked_prefill=False,
            kv_cache_memory_bytes=cpu_cache_bytes(setup, dtype),
        )
        _check_head_width(setup)
        _refuse_experts(setup)
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


def _check_head_width(setup: RolloutSetup) -> None:
    """vLLM itself fails only in the first generation, and without naming the model's setting."""
    width, known = head_width(text_config(setup)), CPUAttentionBackend.get_supported_head_sizes()
    if width not in known:
        raise EngineError(
            f"vLLM on CPU has attention for heads of {', '.join(map(str, known))} elements; the model's have {width}: "
            "use rollout.name=hf"
        )


def _refuse_experts(setup: RolloutSetup) -> None:
    """vLLM's CPU kernels take the experts' weights in a layout of their own, made once when the model is loaded."""
    values = text_config(setup).to_dict()
    if values.get("num_experts") or values.get("num_local_experts"):
        raise EngineError(
            f"vLLM on CPU repacks the experts of {setup.model.path} when it loads them, so they could not be updated: "
            "use rollout.name=hf"
        )


def keep_weights_unpacked() -> None:
    """In the process that holds the model, before it is built: stop vLLM's CPU linear layers from repacking.  That frees the
    parameters, so they could not be written again, and with tied embeddings it would keep computing logits from the old
    output layer without a word."""
    if current_platform.is_cpu():
        vllm_custom_ops._supports_onednn = False
        vllm_layer_utils.check_cpu_sgl_kernel = lambda *_: False
