"""Megatron-core on machines without CUDA: its modules get a `torch` in which "cuda" means the CPU.

Megatron-core uses the current CUDA device, streams and CUDA generators without checking whether there are any.  Each of its
modules (and nothing else in the process: vLLM, transformers and FSDP see the real torch) gets a stand-in for the name `torch`,
two tensor methods answer differently when Megatron calls them, and its random-number bookkeeping uses the CPU's generator.
Where CUDA exists, this module does nothing.

Import this module before megatron, which then does not warn about missing kernels, and call `install` after importing megatron
modules; call it again after importing more of them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

MEGATRON = "megatron.core"
FACTORIES = (
    *("empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "rand", "randn", "randint", "linspace", "eye"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "empty_strided"),
)
MISSING_KERNELS = r"(Apex is|Transformer Engine and Apex are) not installed"
"""Matches Megatron's warnings at import about missing fused CUDA kernels, which a machine without CUDA never has."""
NOT_OURS = (
    r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated",
    r"When using (sequence|async grad|tensor model) parallelism.* CUDA_DEVICE_MAX_CONNECTIONS",
)
"""Matches warnings about megatron's own calls, which no user without CUDA can avoid."""

UNUSED = ("wandb", "torch.utils.tensorboard")
"""The trackers that megatron imports for its own timers, which takes a quarter of its import time."""


@contextlib.contextmanager
def _not_found(names: tuple[str, ...]) -> Iterator[None]:
    """Makes imports of packages that are not loaded yet fail inside the context, as if they were not installed."""
    hidden = [name for name in names if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: the import system's mark for it
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Makes `torch.compile` return functions unchanged inside the context.

    Megatron decorates functions of its modules, which alone loads torch's compiler (a second and a half).  On CPU they would
    be compiled by a C++ compiler at their first call.
    """
    real = torch.compile
    torch.compile = lambda function: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = real


if not torch.cuda.is_available():
    with warnings.catch_warnings(), _not_found(UNUSED), _uncompiled():
        warnings.filterwarnings("ignore", message=MISSING_KERNELS)
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.models.gpt.gpt_model
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401


def install() -> None:
    """Makes the megatron modules imported so far run on the CPU.  Idempotent; does nothing where CUDA exists."""
    if torch.cuda.is_available():
        return
    _patch_tensor_methods()
    _silence()
    for name, module in list(sys.modules.items()):
        if name.startswith(MEGATRON) and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = _stand_in()
    random = sys.modules.get(f"{MEGATRON}.tensor_parallel.random")
    if random is not None:
        _use_cpu_generator(random)
    dispatcher = sys.modules.get(f"{MEGATRON}.transformer.moe.token_dispatcher")
    if dispatcher is not None:
        dispatcher.__dict__["maybe_move_tensor_to_cpu"] = _on_host


@functools.cache
def _silence() -> None:
    for message in NOT_OURS:
        warnings.filterwarnings("ignore", message=message)


class _Stream:
    """A CUDA stream or event on a machine where everything happens in order: any method does nothing and returns a stream or
    event."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stream


class _StandIn(types.ModuleType):
    """A module with some names replaced; all others are the real module's."""

    def __init__(self, real: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(replaced)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Returns a tensor factory that accepts a CUDA device and creates a CPU tensor."""

    @functools.wraps(make)
    def factory(*args: Any, **options: Any) -> Tensor:
        device = options.get("device")
        if isinstance(device, int) or str(device).startswith("cuda"):
            options["device"] = "cpu"
        if options.get("pin_memory"):
            options["pin_memory"] = False
        return make(*args, **options)

    return factory


def _get_generator_state(*_: Any, **__: Any) -> Tensor:
    return torch.get_rng_state()


def _set_generator_state(state: Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Returns the numbers of tokens of experts as megatron's own function does, for CPU tensors too: that one makes arrays
    only of tensors from a GPU, but collectives take no tensors."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@contextlib.contextmanager
def _fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Forks as CudaRNGStatesTracker.fork does, with the CPU's generator; megatron's own warns when that generator moves."""
    before = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(before)


def _all_gather(tensors: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gathers tensors, also of unequal sizes (tokens of experts), which gloo's own all-gather cannot."""
    if async_op or len({target.shape for target in tensors}) == 1:
        return torch.distributed.all_gather(tensors, tensor, group=group, async_op=async_op)
    tensors[torch.distributed.get_rank(group)].copy_(tensor)
    for rank, target in enumerate(tensors):
        torch.distributed.broadcast(target, group=group, group_src=rank)
    return None


def _reduce_scatter(
    output: Tensor, inputs: list[Tensor], op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """Sums each rank's share over the ranks, also shares of unequal sizes, which gloo's own reduce-scatter cannot."""
    if op != ReduceOp.SUM or async_op or len({share.shape for share in inputs}) == 1:
        return torch.distributed.reduce_scatter(output, inputs, op, group, async_op)
    total = torch.cat(inputs)
    torch.distributed.all_reduce(total, group=group)
    output.copy_(torch.split(total, [share.shape[0] for share in inputs])[torch.distributed.get_rank(group)])
    return None


def _autocast(device_type: str = "cuda", *args: Any, **options: Any) -> Any:
    return torch.autocast("cpu" if device_type == "cuda" else device_type, *args, **options)


@functools.cache
def _stand_in() -> types.ModuleType:
    """Returns the `torch` of megatron modules."""
    cuda = _StandIn(
        torch.cuda,
        {
            "current_device": lambda: "cpu",
            "device_count": lambda: 1,
            "set_device": _nothing,
            "synchronize": _nothing,
            "empty_cache": _nothing,
            "Stream": _Stream,
            "Event": _Stream,
            "current_stream": _Stream,
            "default_stream": _Stream,
            "stream": lambda _: contextlib.nullcontext(),
            "is_current_stream_capturing": lambda: False,
            "manual_seed": torch.manual_seed,
            "get_rng_state": _get_generator_state,
            "set_rng_state": _set_generator_state,
            "random": types.SimpleNamespace(get_rng_state=_get_generator_state),
            "memory_allocated": _zero,
            "max_memory_allocated": _zero,
            "memory_reserved": _zero,
        },
    )
    collectives = _StandIn(torch.distributed, {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter})
    factories = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    return _StandIn(torch, {**factories, "cuda": cuda, "distributed": collectives, "autocast": _autocast})


def _called_by_megatron() -> bool:
    """Returns whether a megatron module called the calling function."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(MEGATRON)


@functools.cache
def _patch_tensor_methods() -> None:
    """Makes `Tensor.type()` name CUDA types, by which megatron recognises dtypes, and makes `Tensor.cuda()` do nothing."""
    real_type, real_cuda = torch.Tensor.type, torch.Tensor.cuda

    def type_(self: Tensor, *args: Any, **options: Any) -> Any:
        result = real_type(self, *args, **options)
        return result.replace("torch.", "torch.cuda.") if not args and not options and _called_by_megatron() else result

    def cuda(self: Tensor, *args: Any, **options: Any) -> Tensor:
        return self if _called_by_megatron() else real_cuda(self, *args, **options)

    torch.Tensor.type, torch.Tensor.cuda = type_, cuda  # type: ignore[method-assign, assignment]


def _use_cpu_generator(random: types.ModuleType) -> None:
    replaced = {"_set_cuda_rng_state": _set_generator_state, "_get_cuda_rng_state": _get_generator_state}
    random.__dict__.update(replaced)
    random.__dict__["CudaRNGStatesTracker"].fork = _fork
