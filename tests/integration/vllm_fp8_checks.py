"""Quantized projections in vLLM's layout, on every tensor-parallel rank: vLLM's own loader writes, the weight map reads.

The layers are vLLM's, built as for a checkpoint in eight bits, without a device and without a process group, since each rank is
told its place; nothing is multiplied.  test_rollout_vllm.py runs these tests in a process of their own, because importing vLLM
changes one for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhub.engines.rollout.vllm import environment  # before vLLM, for which it sets variables
from rlhub.engines.rollout.vllm.entrypoints import FP8_OVERRIDES
from rlhub.engines.rollout.vllm.internals import PLAIN_FP8_KERNELS, check_fp8_kernels
from rlhub.engines.rollout.vllm.worker import live_weights, load_stream, weight_dtypes
from rlhub.errors import EngineError
from rlhub.protocol.weights.pieces import BLOCK, FP8, RELATIVE_ERROR, STEP_BELOW, Piece, dequantize, quantize, scales_name, take

# isort: split
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear import FP8ScaledMMLinearLayerConfig
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.fp8 import Fp8Config

HIDDEN, WIDTH, HEAD, HEADS, KV_HEADS = 256, 512, 128, 4, 2
PREFIX = "model.layers.0"
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (WIDTH, HIDDEN),
    "mlp.up_proj": (WIDTH, HIDDEN),
    "mlp.down_proj": (HIDDEN, WIDTH),
}
SHARDS: dict[str, tuple[str, str | int | None]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "o_proj": ("o_proj", None),
    "down_proj": ("down_proj", None),
}
"""The layer of vLLM's that has a projection, and the projection's name in its loader: as vLLM's model of Qwen maps them."""


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    config = VllmConfig()
    object.__setattr__(config, "model_config", _TwoBytes())
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **given: _kernel("TritonFp8BlockScaledMMKernel", **given))
    with set_current_vllm_config(config):
        yield


class _TwoBytes(ModelConfig):
    """What the layers ask of a model's configuration."""

    def __init__(self) -> None:
        self.dtype = torch.bfloat16


def _kernel(name: str, **given: Any) -> Any:
    """The kernel of that name, as vLLM builds it where a GPU has it."""
    given.pop("module_name")
    return getattr(kernels, name)(FP8ScaledMMLinearLayerConfig(**given))


@pytest.fixture
def full() -> dict[str, Tensor]:
    """The trainer's weights of one layer."""
    torch.manual_seed(3)
    return {f"{PREFIX}.{name}.weight": torch.randn(shape) for name, shape in SHAPES.items()}


@pytest.fixture
def stored(full: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is sent of them."""
    found = {}
    for name, weight in full.items():
        found[name], found[scales_name(name)] = quantize(weight)
    return found


class Layer(nn.Module):
    """A model whose only weights are the projections of one layer."""

    def __init__(self, width: int = WIDTH, head: int = HEAD) -> None:
        super().__init__()
        config = Fp8Config.from_config(FP8_OVERRIDES["quantization_config"])
        options = {"bias": False, "quant_config": config, "params_dtype": torch.bfloat16}
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Module()])
        attention, mlp = nn.Module(), nn.Module()
        self.model.layers[0].self_attn, self.model.layers[0].mlp = attention, mlp
        attention.qkv_proj = QKVParallelLinear(HIDDEN, head, HEADS, KV_HEADS, **options)
        attention.o_proj = RowParallelLinear(HEADS * head, HIDDEN, **options)
        mlp.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [width] * 2, **options)
        mlp.down_proj = RowParallelLinear(width, HIDDEN, **options)


def layer(monkeypatch: pytest.MonkeyPatch, size: int, rank: int, **sizes: int) -> Layer:
    for module in (linear, parameter):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size)
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr("vllm.distributed.get_tensor_model_parallel_world_size", lambda: size)
    return Layer(**sizes)


def load(model: Layer, stored: dict[str, Tensor]) -> Layer:
    """Writes through vLLM's own loaders, as its models do with a checkpoint."""
    for name, tensor in stored.items():
        *path, projection, leaf = name.split(".")
        fused, shard = SHARDS[projection]
        target = getattr(model.get_submodule(".".join([*path, fused])), leaf)
        target.weight_loader(target, tensor, *([] if shard is None else [shard]))
    return model


def finish(model: Layer) -> None:
    """What vLLM does with the parameters when they are loaded, before the kernel reads them."""
    for module in model.modules():
        if "quant_method" in vars(module):
            module.quant_method.process_weights_after_loading(module)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def differing(model: nn.Module, stored: dict[str, Tensor]) -> set[str]:
    """The names of live weights that are not the part of what was sent."""
    return {p.name for p in live_weights(model) if not torch.equal(bits(p.tensor), bits(take(stored[p.name], p.region)))}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_vllms_loader_and_the_map_agree_on_every_rank(
    size: int, full: dict[str, Tensor], stored: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    covered: dict[str, list[Piece]] = {}
    for rank in range(size):
        model = load(layer(monkeypatch, size, rank), stored)
        assert differing(model, stored) == set()
        for piece in live_weights(model):
            assert piece.shape == stored[piece.name].shape and piece.tensor.dtype == stored[piece.name].dtype
            covered.setdefault(piece.name, []).append(piece)
    assert covered.keys() == stored.keys()
    for name, weight in full.items():
        back, scales = (torch.zeros_like(stored[of]) for of in (name, scales_name(name)))
        for of, whole in ((name, back), (scales_name(name), scales)):
            for piece in covered[of]:
                take(whole, piece.region).copy_(piece.tensor)
        steps = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        bound = torch.maximum(RELATIVE_ERROR * weight.abs(), STEP_BELOW * steps) * 1.0001
        assert bool(((dequantize(back, scales, torch.float32) - weight).abs() <= bound).all()), name


@pytest.mark.parametrize("kernel", PLAIN_FP8_KERNELS)
@pytest.mark.parametrize("size", [1, 2])
def test_updates_reach_the_memory_that_a_known_kernel_reads(
    kernel: str, size: int, stored: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With such a kernel the parameters are ready for it as they were loaded, and each update writes into the same memory."""
    if not hasattr(kernels, kernel):
        pytest.skip(f"this vLLM has no {kernel}")
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **given: _kernel(kernel, **given))
    model = load(layer(monkeypatch, size, size - 1), {name: tensor.clone() for name, tensor in stored.items()})
    finish(model)
    check_fp8_kernels(model)
    assert differing(model, stored) == set()
    memory = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for seed in range(2):
        torch.manual_seed(10 + seed)
        sent = {}
        for name, tensor in stored.items():
            if tensor.dtype == FP8:
                sent[name], sent[scales_name(name)] = quantize(torch.randn(tensor.shape))
        load_stream(model, [[entry] for entry in sent.items()], weight_dtypes(model))
        assert differing(model, sent) == set() and differing(model, stored) == set(sent)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == memory


def test_what_is_changed_is_named(stored: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(layer(monkeypatch, 1, 0), stored)
    live = {piece.name: piece.tensor for piece in live_weights(model)}
    up, scales = f"{PREFIX}.mlp.up_proj.weight", f"{PREFIX}.mlp.gate_proj.weight_scale_inv"
    live[up].view(torch.uint8)[300, 5] ^= 1
    assert differing(model, stored) == {up}
    live[scales].copy_(live[scales].flip(0))
    assert differing(model, stored) == {up, scales}
    rows = model.get_submodule(f"{PREFIX}.self_attn.qkv_proj").weight_scale_inv.data
    rows.copy_(rows.roll(1, 0))
    attention = {f"{PREFIX}.self_attn.{part}_proj.weight_scale_inv" for part in "qkv"}
    assert differing(model, stored) == {up, scales} | attention


def test_weights_that_were_not_quantized_are_refused(
    full: dict[str, Tensor], stored: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(layer(monkeypatch, 1, 0), stored)
    with pytest.raises(EngineError, match=r"came as torch\.float32"):
        load_stream(model, [list(full.items())], weight_dtypes(model))


@pytest.mark.parametrize(("size", "sizes"), [(1, {"head": 64, "width": 576}), (2, {"width": 384}), (4, {"head": 64})])
def test_blocks_that_are_cut_are_refused(
    size: int, sizes: dict[str, int], stored: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vLLM where it builds the layer, or by the map where vLLM allows it."""
    with pytest.raises((EngineError, ValueError), match=r"whole blocks|not divisible by weight quantization|layout"):
        list(live_weights(layer(monkeypatch, size, 0, **sizes)))


def test_other_layouts_are_refused(stored: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(layer(monkeypatch, 1, 0), stored)
    down = model.get_submodule(f"{PREFIX}.mlp.down_proj")
    scales = down.weight_scale_inv
    down.weight_scale_inv = nn.Parameter(scales.data.t().contiguous(), requires_grad=False)
    with pytest.raises(EngineError, match=r"down_proj\.weight_scale_inv.*layout that is not known"):
        list(live_weights(model))
    down.weight_scale_inv = nn.Parameter(scales.data.to(torch.float8_e8m0fnu), requires_grad=False)
    with pytest.raises(EngineError, match="layout that is not known"):
        list(live_weights(model))


def test_other_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    disabled = environment.QUANTIZED_VARIABLES["VLLM_DISABLED_KERNELS"].split(",")
    known = {kernel.__name__ for kernel in kernels._POSSIBLE_FP8_BLOCK_KERNELS[kernels.PlatformEnum.CUDA]}
    assert known <= {*disabled, *PLAIN_FP8_KERNELS}, "a kernel of this vLLM is neither known nor disabled"
    model = layer(monkeypatch, 1, 0)
    model.get_submodule(f"{PREFIX}.mlp.down_proj").quant_method.fp8_linear = nn.Identity()
    with pytest.raises(EngineError, match=r"down_proj with Identity.*quantization=null"):
        check_fp8_kernels(model)
