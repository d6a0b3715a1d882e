"""Which engines and models can generate with quantized weights: rules that load no torch, for the checks before the start.

The weights of the projections of attention and MLP are stored in eight bits (see protocol.weights.fp8), which each update fills
from the trainer's, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.models.shape import NUM_EXPERTS

BLOCK = 128
"""Rows and columns of the blocks of protocol.weights.fp8, which loads torch."""
KEY = "actor_rollout_ref.rollout"


def hf_reasons(config: RolloutConfig, values: Mapping[str, Any], *, device: str) -> list[str]:
    """Returns why the hf engine cannot generate with quantized weights.  values: the content of config.json, empty where that is
    not known.  device: cpu or cuda."""
    return [*_model_reasons(values)]


def vllm_reasons(config: RolloutConfig, values: Mapping[str, Any], *, device: str) -> list[str]:
    """Returns why vLLM cannot generate with quantized weights.  Arguments as in `hf_reasons`."""
    found = [*_model_reasons(values)]
    if device == "cpu":
        found.append(
            "vLLM's kernels for this on CPU need AMX and repack the weights, which could not be written again; set "
            f"{KEY}.name=hf, or run on GPUs"
        )
    if config.dtype == "float32":
        found.append(f"vLLM computes with such weights in 16 bits only; set {KEY}.dtype=bfloat16")
    if config.mode == "async" and config.tensor_model_parallel_size > 1:
        found.append(
            f"replicas with {KEY}.tensor_model_parallel_size={config.tensor_model_parallel_size} hold their weights in processes "
            "of vLLM's, to which none go quantized; set it to 1"
        )
    return found + [*_block_reasons(values, config.tensor_model_parallel_size)]


def _model_reasons(values: Mapping[str, Any]) -> Iterator[str]:
    if count := next((int(values[name]) for name in NUM_EXPERTS if int(values.get(name) or 0) > 1), 0):
        yield f"the model has {count} experts in a layer, whose fused weights no engine here stores quantized"
    if values.get("vision_config"):
        yield "the model reads images, and its vision tower is not stored quantized"


def _block_reasons(values: Mapping[str, Any], ranks: int) -> Iterator[str]:
    """Yields the sizes of the model, for one of `ranks` tensor-parallel ranks, that are no whole blocks."""
    if not {"hidden_size", "num_attention_heads", "intermediate_size"} <= values.keys():
        return
    heads, hidden = int(values["num_attention_heads"]), int(values["hidden_size"])
    width = int(values.get("head_dim") or hidden // heads)
    kv_heads = int(values.get("num_key_value_heads") or heads)
    of_ranks = f" / {ranks} ranks" if ranks > 1 else ""
    sizes = {
        f"hidden_size={hidden}": hidden,
        f"intermediate_size={values['intermediate_size']}{of_ranks}": int(values["intermediate_size"]) / ranks,
        f"{heads} heads x {width}{of_ranks}": heads * width / ranks,
        f"{kv_heads} key-value heads x {width}{of_ranks}": max(kv_heads // ranks, 1) * width,
    }
    if cut := [f"{name} = {size:g}" for name, size in sizes.items() if size % BLOCK]:
        lower = f", or {KEY}.tensor_model_parallel_size lower" if ranks > 1 else ""
        yield (
            f"a scale belongs to {BLOCK} x {BLOCK} elements, and vLLM stores projections one below the other, so that sizes must "
            f"be multiples of {BLOCK}: {', '.join(cut)}; set {KEY}.name=hf{lower}"
        )
