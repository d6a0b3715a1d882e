"""Folders of well-known models without their weights: a config.json with the published sizes, which is all that the checks before
a start read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN2 = {"model_type": "qwen2", "hidden_act": "silu", "max_position_embeddings": 32768, "rope_theta": 1e6, "vocab_size": 152064}
_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-0.5B": _QWEN2 | {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen2.5-1.5B": _QWEN2 | {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "Qwen2.5-7B": _QWEN2 | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4},
    "Qwen2.5-32B": _QWEN2 | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8},
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 131072, "rope_theta": 5e5,
        "rope_scaling": _LLAMA3_ROPE, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_act": "silu", "max_position_embeddings": 40960, "rope_theta": 1e6,
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
}  # fmt: skip
"""By the name that the model has on its hub; variants such as -Instruct have the same sizes."""
NUM_PARAMS = {
    "Qwen2.5-0.5B": 0.494e9, "Qwen2.5-1.5B": 1.544e9, "Qwen2.5-7B": 7.616e9, "Qwen2.5-32B": 32.76e9, "Llama-3.1-8B": 8.030e9,
    "Qwen3-30B-A3B": 30.53e9,
}  # fmt: skip
"""As the models' cards count them."""


def save_shape(folder: Path, name: str) -> Path:
    """Writes the model's config.json into `folder`, which is made, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return folder


def shape_named_like(path: str) -> str:
    """Returns the shape of a hub name such as Qwen/Qwen2.5-7B-Instruct.  KeyError: there is none."""
    name = path.rpartition("/")[2]
    found = [shape for shape in SHAPES if name == shape or name.startswith(f"{shape}-")]
    if len(found) != 1:
        raise KeyError(f"no shape for {path}; known: {', '.join(SHAPES)}")
    return found[0]
