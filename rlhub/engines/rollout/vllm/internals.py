"""Every internal of vLLM that rlhub uses; no other module touches one.

Everything else goes through vLLM's public interface: LLM, LLMEngine and AsyncLLMEngine with their arguments, prompts and
outputs, the platform, and the model's layers.  vLLM gives no promise for the names below, so `INTERNALS` lists each with the
reason for its use, and a unit test reports the ones that the installed vLLM lacks.  Imports vLLM: see `environment`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import vllm._custom_ops as custom_ops
from torch import Tensor, nn
from vllm import LLM, AsyncLLMEngine, CompletionOutput
from vllm.distributed import destroy_model_parallel
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers import utils as layer_utils
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

from rlhub.errors import EngineError

__all__ = ["MultiprocExecutor", "UniProcExecutor"]
ADAPTER_ID = 1  # of the only LoRA adapter of an engine; vLLM counts from 1
CPU_EXPERTS: Any = vars(cpu_moe).get("CPUUnquantizedExperts")
OLDER_EXPERTS = "vllm.model_executor.layers.fused_moe.cpu_fused_moe"
"""Experts on CPU: the class of vLLM 0.28 and later, None before; and the module that has theirs before."""
ROUTING = ("custom_routing_function", "renormalize", "scoring_func", "use_grouped_topk")
"""How a kernel that chooses the experts does it: attributes of vLLM's layer and of the kernel."""

INTERNALS = {
    "vllm._custom_ops:_supports_onednn": "linear layers on CPU must compute with the parameters that updates write",
    "vllm.lora.layers.base_linear:BaseLinearLayerWithLoRA.set_lora": "its tensors of adapters are read back and written",
    "vllm.lora.lora_model:LoRAModel.from_lora_tensors": "new adapters come from memory; its public interface reads files",
    "vllm.lora.model_manager:LoRAModelManager.activate_adapter": "new adapters come from memory",
    "vllm.lora.model_manager:LoRAModelManager.get_adapter": "to know which layers the adapter has",
    "vllm.lora.peft_helper:PEFTHelper": "new adapters come from memory",
    "vllm.model_executor.layers.quantization.fp8:Fp8LinearMethod": "its kernel, fp8_linear, decides the layout of the weights",
    "vllm.model_executor.layers.utils:check_cpu_sgl_kernel": "linear layers on CPU must compute with the parameters",
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.get_supported_head_sizes": "to refuse a model before it is built",
    "vllm.v1.engine.async_llm:AsyncLLM.engine_core": "vLLM's own pause sleeps 20 ms, several times an exchange of weights",
    "vllm.v1.engine.core_client:AsyncMPClient.pause_scheduler_async": "the pause without that sleep",
    "vllm.v1.engine.llm_engine:LLMEngine.engine_core": "to shut the engine down, which its public interface cannot",
    "vllm.v1.engine.llm_engine:LLMEngine.model_executor": "to shut the engine down and leave the process group alone",
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": "the engine core must end with the process that owns it",
    "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher._distributed_args": "two jobs must not share memory",
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": "the engine core must end with the process that owns it",
}
"""Maps `module:name` or `module:Class.attribute` to the reason for its use."""
NEWER_INTERNALS = {
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe:CPUUnquantizedExperts._padded_intermediate_size": (
        "experts on CPU must compute with the parameters that updates write",
        ["vllm.model_executor.layers.fused_moe.cpu_fused_moe:CPUFusedMOE.init_moe_torch"],
    ),
    "vllm.outputs:CompletionOutput.weight_versions": (
        "to know which policy sampled a token",
        [
            "vllm.v1.engine.async_llm:AsyncLLM.output_processor",
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
            "vllm.v1.engine.output_processor:OutputProcessor.request_states",
            "vllm.v1.engine.output_processor:RequestState.queue",
        ],
    ),
    "vllm.v1.engine.core_client:InprocClient._finalizer": ("it would destroy the trainer's process group", []),
}
"""Maps what some supported vLLM lacks to the reason for its use, and to what is used there instead, if anything must be."""


def keep_weights_unpacked() -> None:
    """Stops vLLM's linear layers and experts on CPU from repacking their weights.  Call in the process that holds the model,
    before it is built.

    Repacking frees the parameters, so they could not be written again, and with tied embeddings vLLM would silently go on
    computing logits from the old output layer.  Experts have no other kernel: theirs are packed for every pass.
    """
    if not current_platform.is_cpu():
        return
    custom_ops._supports_onednn = False
    layer_utils.check_cpu_sgl_kernel = lambda *_: False
    if CPU_EXPERTS is not None:
        CPU_EXPERTS.process_weights_after_loading = _keep_experts
        CPU_EXPERTS.apply = _apply_experts
    else:
        importlib.import_module(OLDER_EXPERTS).CPUFusedMOE.__init__ = _loop_over_experts


_apply_packed: Any = None if CPU_EXPERTS is None else CPU_EXPERTS.apply


def _loop_over_experts(self: Any, layer: nn.Module) -> None:
    """Makes the experts of vLLM 0.27 and older compute as linear layers, with the parameters that the layer then has: those of
    vLLM's own loop remember the first ones."""
    self.isa, self.forward_method = "none", self.forward_torch
    self.init_moe_torch(layer)
    for linear, weight in {"gate_up_linear": "w13_weight", "down_linear": "w2_weight"}.items():
        experts = range(len(getattr(layer, weight)))
        setattr(layer, linear, [partial(_expert, layer, weight, expert) for expert in experts])


def _expert(layer: nn.Module, weight: str, expert: int, hidden: Tensor) -> Tensor:
    return nn.functional.linear(hidden, getattr(layer, weight)[expert])


def _keep_experts(self: Any, layer: nn.Module) -> None:
    """Does what is left of vLLM's preparation without the packing: in vLLM 0.28 and 0.29 the kernel chooses the experts too, and
    has to know how."""
    vars(self).update({name: getattr(layer, name) for name in vars(self).keys() & ROUTING})


def _apply_experts(self: Any, *, w1: Tensor, w2: Tensor, **more: Any) -> Any:
    """Computes with the parameters as they are, w1 (experts, 2 x intermediate, hidden) and w2 (experts, hidden, intermediate),
    padded to what the kernel asks for.  Returns what vLLM's own method does."""
    num_experts, hidden, width = w2.shape
    padding = self._padded_intermediate_size(self.moe_config) - width
    gate_up = nn.functional.pad(w1.view(num_experts, 2, width, hidden), (0, 0, 0, padding)).view(num_experts, -1, hidden)
    down = nn.functional.pad(w2, (0, padding))
    packed = [custom_ops.cpu_prepack_moe_weight(weight.contiguous(), self.isa) for weight in (gate_up, down)]
    return _apply_packed(self, w1=packed[0], w2=packed[1], **more)


@dataclass(slots=True, kw_only=True)
class AdapterPart:
    """The adapter of one Hugging Face layer in vLLM's live memory, on this rank.

    path, base: the module of vLLM's that has the layer, perhaps fused with others, and its frozen part.  index: the layer's
    number among those.  low: A (rank, in).  high: B (out, rank), which contains the scale.
    """

    path: str
    base: Any  # vLLM gives no types
    index: int
    low: Tensor
    high: Tensor


def adapted_modules(model: nn.Module) -> dict[str, Any]:
    """Returns the frozen part of each module of the model to which vLLM can add an adapter; none if it was built without LoRA."""
    manager = _lora_manager(model)
    return {} if manager is None else {path: layer.base_layer for path, layer in manager.modules.items()}


def adapter_parts(model: nn.Module) -> list[AdapterPart]:
    """Returns the live parts of the model's adapter; [] before `load_adapter`."""
    manager = _lora_manager(model)
    adapter = None if manager is None else manager.get_adapter(ADAPTER_ID)
    if manager is None or adapter is None:
        return []
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    return [
        part
        for path, layer in manager.modules.items()
        if (weights := adapter.get_lora(path)) is not None
        for part in _parts(path, layer, slot, adapter.rank, weights.lora_a)
    ]


def _parts(path: str, layer: BaseLayerWithLoRA, slot: int, rank: int, present: Tensor | list[Tensor | None]) -> list[AdapterPart]:
    """Returns the parts of one module.  present: A of each fused layer, None of one without an adapter."""
    lists = present if isinstance(present, list) else [present]
    stacked = zip(lists, layer.lora_a_stacked, layer.lora_b_stacked, strict=True)
    return [
        AdapterPart(path=path, base=layer.base_layer, index=index, low=low[slot, 0, :rank], high=high[slot, 0, :, :rank])
        for index, (found, low, high) in enumerate(stacked)
        if found is not None
    ]


def load_adapter(model: nn.Module, tensors: dict[str, Tensor], rank: int) -> None:
    """Gives the model an adapter through vLLM's own loader, in the place of the one before.

    tensors: full A and B of the adapted layers, under their names in peft's files; B contains the scale.
    """
    manager = _lora_manager(model)
    assert manager is not None, "the engine was built without LoRA"
    settings = PEFTHelper(r=rank, lora_alpha=rank, target_modules=[])
    dtype = manager.lora_config.lora_dtype
    adapter = LoRAModel.from_lora_tensors(ADAPTER_ID, tensors, settings, device="cpu", dtype=dtype)
    with torch.no_grad():
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)


def _lora_manager(model: nn.Module) -> LoRAModelManager | None:
    return vars(model).get("lora_manager")


PLAIN_FP8_KERNELS = ("CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel", "BlockWiseTorchFP8ScaledMMLinearKernel")
"""The kernels that compute with quantized weights and float32 scales as a checkpoint has them."""


def check_fp8_kernels(model: nn.Module) -> None:
    """Raises EngineError where a quantized layer has a kernel whose layout of the weights is not known here."""
    for path, module in model.named_modules():
        method = vars(module).get("quant_method")
        if not isinstance(method, Fp8LinearMethod):
            continue
        name = type(getattr(method, "fp8_linear", method)).__name__  # older versions have no kernel of its own there
        if name not in PLAIN_FP8_KERNELS:
            raise EngineError(
                f"vLLM computes {path} with {name}, in whose layout of quantized weights new ones are not known to be right; "
                f"known are {', '.join(PLAIN_FP8_KERNELS)}, which need a GPU with compute capability 8.9 or more: set "
                "rollout.quantization=null"
            )


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


async def pause(llm: AsyncLLMEngine) -> None:
    """Stops the engine between two steps and returns when no step is computing.  Requests keep their tokens and cache.

    vLLM's own method then sleeps, so that outputs of the last step reach their readers before it returns.  Here these keep their
    order without that: a change of the weights' version makes two more round trips to the core over the same loop.
    """
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)


class ReportedVersions:
    """Versions of the weights that sampled each token, as vLLM marks them itself."""

    def __init__(self, llm: AsyncLLMEngine) -> None:
        self.llm = llm

    async def change(self, version: int) -> None:
        """Marks the tokens of later steps with this version.  The engine is paused, or has no requests."""
        await self.llm.update_weight_version(str(version))

    def of(self, queue: Any, last: CompletionOutput) -> list[int]:
        """Returns the version of each token of a request, from what `add_request` returned and its last output."""
        return [int(span.version) for span in last.weight_versions or () for _ in range(span.start, span.end)]


class TimedVersions:
    """The same where vLLM's outputs have no versions, which is before 0.32: from the time at which the engine core made them.

    The core runs on this machine, so that its monotonic clock is this process's.  No step runs while the version changes, so that
    no token is made at that time.
    """

    def __init__(self, llm: AsyncLLMEngine) -> None:
        self.llm = llm
        self.changes: list[tuple[float, int]] = []
        self.versions: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # by the queue of a request's outputs
        self.process = llm.output_processor.process_outputs
        llm.output_processor.process_outputs = self.mark

    async def change(self, version: int) -> None:
        await self.llm.is_paused()  # outputs of earlier steps reach their readers before the answer does
        self.changes.append((time.monotonic(), version))

    def of(self, queue: Any, last: CompletionOutput) -> list[int]:
        return self.versions.get(queue, [])

    def mark(self, outputs: Sequence[Any], made: float, *more: Any) -> Any:
        version = next(version for since, version in reversed(self.changes) if since <= made)
        for output in outputs:
            state = self.llm.output_processor.request_states.get(output.request_id)
            if state is not None:  # otherwise the request has ended
                self.versions.setdefault(state.queue, []).extend([version] * len(output.new_token_ids))
        return self.process(outputs, made, *more)


TokenVersions = ReportedVersions | TimedVersions


def token_versions(llm: AsyncLLMEngine) -> TokenVersions:
    """Returns how to know the versions of the engine's tokens.  Call before its first request."""
    reported = any(field.name == "weight_versions" for field in fields(CompletionOutput))
    return ReportedVersions(llm) if reported else TimedVersions(llm)


def spare_process_group(llm: LLM) -> None:
    """Keeps garbage collection from shutting the engine down, which would destroy torch's default process group.

    The engine core of vLLM 0.30 and older has no such finalizer.
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
