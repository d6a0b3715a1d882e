"""Construct vLLM for in-process use beside a trainer.  Imports vLLM: see `environment` for what must come first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import vllm._custom_ops as vllm_custom_ops
from torch import nn
from vllm import LLM
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.model_executor.layers import utils as vllm_layer_utils
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm.environment import job_identity
from rlhub.engines.rollout.vllm.memory import CPU_BLOCK_TOKENS, cpu_cache_bytes, head_width, text_config
from rlhub.errors import EngineError


def supports_sleep(setup: RolloutSetup) -> bool:
    """Whether `sleep` will free memory: asked for, and possible on this platform."""
    return setup.config.free_cache_engine and bool(current_platform.is_sleep_mode_available())


def build_llm(setup: RolloutSetup, dtype: torch.dtype, *, in_process_group: bool) -> LLM:
    """The engine.  in_process_group: torch.distributed is initialized, so ranks of this job form the tensor-parallel
    groups; without it vLLM makes a group of its own for this one process."""
    arguments = _arguments(setup, dtype)
    if in_process_group:
        arguments["distributed_executor_backend"] = "external_launcher"
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
        _keep_weights_unpacked()
    with _named_shared_memory():
        llm = LLM(**arguments)
    if in_process_group:
        # When collected, the client would run the shutdown that `shut_down` avoids.
        llm.llm_engine.engine_core._finalizer.detach()
    return llm


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
        "enable_sleep_mode": supports_sleep(setup),
        "async_scheduling": False if setup.config.mode == "async" else None,  # else a step would always be under way
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


def _keep_weights_unpacked() -> None:
    """Stop vLLM's CPU linear layers from repacking: that frees the parameters, so they could not be written again, and
    with tied embeddings it would keep computing logits from the old output layer without a word."""
    vllm_custom_ops._supports_onednn = False
    vllm_layer_utils.check_cpu_sgl_kernel = lambda *_: False


@contextmanager
def _named_shared_memory() -> Iterator[None]:
    """vLLM names a tensor-parallel group's shared memory after its rendezvous address, which with the external launcher
    is the same for every job on the machine: two jobs would add up each other's activations."""
    original = ExecutorWithExternalLauncher._distributed_args

    def distributed_args(self: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
        _, rank, local_rank = original(self)
        return f"env://:{job_identity()}", rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = distributed_args
    try:
        yield
    finally:
        ExecutorWithExternalLauncher._distributed_args = original


def driver_model(llm: LLM) -> nn.Module:
    """This rank's part of the model, live."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def forget_prefixes(llm: LLM) -> None:
    """Let no later request find a prefix in the cache; running requests keep their blocks.

    vLLM's own reset refuses while requests hold blocks, or takes the blocks away from them.
    """
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    pool.cached_block_hash_to_block = type(pool.cached_block_hash_to_block)()
    pool.cached_block_hashes_by_block.clear()
    for block in pool.blocks:
        block.reset_hash()


def shut_down(llm: LLM, *, keep_process_group: bool) -> None:
    """Release the engine.  vLLM's own shutdown also destroys torch's default process group, which may be the trainer's."""
    core = llm.llm_engine.engine_core
    if not keep_process_group:
        core.shutdown()
        return
    core.engine_core.model_executor.shutdown()
    core.engine_core.scheduler.shutdown()
    destroy_model_parallel()
