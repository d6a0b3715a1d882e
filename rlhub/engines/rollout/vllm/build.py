"""Construct vLLM for in-process use beside a trainer.  Imports vLLM: see `environment` for what must come first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from vllm import LLM
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm.arguments import engine_arguments, keep_weights_unpacked
from rlhub.engines.rollout.vllm.environment import job_identity


def supports_sleep(setup: RolloutSetup) -> bool:
    """Whether `sleep` will free memory: asked for, and possible on this platform."""
    return setup.config.free_cache_engine and bool(current_platform.is_sleep_mode_available())


def build_llm(setup: RolloutSetup, dtype: torch.dtype, *, in_process_group: bool) -> LLM:
    """The engine.  in_process_group: torch.distributed is initialized, so ranks of this job form the tensor-parallel
    groups; without it vLLM makes a group of its own for this one process."""
    arguments = {
        **engine_arguments(setup, dtype),
        "enable_sleep_mode": supports_sleep(setup),
        "async_scheduling": False if setup.config.mode == "async" else None,  # else a step would always be under way
    }
    if in_process_group:
        arguments["distributed_executor_backend"] = "external_launcher"
    keep_weights_unpacked()
    with _named_shared_memory():
        llm = LLM(**arguments)
    if in_process_group:
        # When collected, the client would run the shutdown that `shut_down` avoids.
        llm.llm_engine.engine_core._finalizer.detach()
    return llm


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
    """This rank's part of the model, live.  (On GPUs the runner's `model` is a wrapper that replays CUDA graphs.)"""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


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
