"""Every internal of vLLM that rlhub uses; no other module touches one.

Everything else goes through vLLM's public interface: LLM, LLMEngine and AsyncLLMEngine with their arguments, prompts and
outputs, the platform, and the model's layers.  vLLM gives no promise for the names below, so `INTERNALS` lists each with the
reason for its use, and a unit test reports the ones that the installed vLLM lacks.  Imports vLLM: see `environment`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import vllm._custom_ops as custom_ops
from vllm import LLM
from vllm.distributed import destroy_model_parallel
from vllm.model_executor.layers import utils as layer_utils
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

__all__ = ["MultiprocExecutor", "UniProcExecutor"]

INTERNALS = {
    "vllm._custom_ops:_supports_onednn": "linear layers on CPU must compute with the parameters that updates write",
    "vllm.model_executor.layers.utils:check_cpu_sgl_kernel": "linear layers on CPU must compute with the parameters",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.get_supported_head_sizes": "to refuse a model before it is built",
    "vllm.v1.engine.core_client:InprocClient._finalizer": "it would destroy the trainer's process group",
    "vllm.v1.engine.llm_engine:LLMEngine.engine_core": "to shut the engine down, which its public interface cannot",
    "vllm.v1.engine.llm_engine:LLMEngine.model_executor": "to shut the engine down and leave the process group alone",
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": "the engine core must end with the process that owns it",
    "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher._distributed_args": "two jobs must not share memory",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": "the engine core must end with the process that owns it",
}
"""Maps `module:name` or `module:Class.attribute` to the reason for its use."""


def keep_weights_unpacked() -> None:
    """Stops vLLM's linear layers on CPU from repacking their weights.  Call in the process that holds the model, before it is
    built.

    Repacking frees the parameters, so they could not be written again, and with tied embeddings vLLM would silently go on
    computing logits from the old output layer.
    """
    if current_platform.is_cpu():
        custom_ops._supports_onednn = False
        layer_utils.check_cpu_sgl_kernel = lambda *_: False


def cpu_head_widths() -> list[int]:
    """Returns the widths of attention heads that vLLM's CPU attention supports."""
    return list(CPUAttentionBackend.get_supported_head_sizes())


@contextmanager
def named_shared_memory(name: str) -> Iterator[None]:
    """Names the shared memory of engines that are built inside the context after the job.

    vLLM names a tensor-parallel group's shared memory after its rendezvous address.  With the external launcher that address
    is the same for every job on the machine, so two jobs would add up each other's activations.
    """
    original = ExecutorWithExternalLauncher._distributed_args

    def distributed_args(self: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
        _, rank, local_rank = original(self)
        return f"env://:{name}", rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = distributed_args
    try:
        yield
    finally:
        ExecutorWithExternalLauncher._distributed_args = original


def spare_process_group(llm: LLM) -> None:
    """Keeps garbage collection from shutting the engine down, which would destroy torch's default process group.

    The engine core of vLLM 0.26 has no such finalizer.
    """
    finalizer = vars(llm.llm_engine.engine_core).get("_finalizer")
    if finalizer is not None:
        finalizer.detach()


def shut_down(llm: LLM, *, keep_process_group: bool) -> None:
    """Releases the engine.  keep_process_group: True leaves torch's default process group alone, which then is not vLLM's own."""
    if keep_process_group:
        llm.llm_engine.model_executor.shutdown()
        destroy_model_parallel()
    else:
        llm.llm_engine.engine_core.shutdown()
