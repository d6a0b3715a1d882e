from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from rlhub.config.sections.training import MegatronConfig
from rlhub.models.megatron import checks
from rlhub.models.megatron.checks import megatron_problems, sparse_layers

DENSE = {
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 67,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": 4096,
    "rope_theta": 10000.0,
}
SPARSE = DENSE | {
    "model_type": "qwen3_moe",
    "num_local_experts": 4,
    "moe_intermediate_size": 20,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}


def problems(values: dict, world_size: int = 8, **megatron: object) -> list[str]:
    return megatron_problems(values, MegatronConfig(**megatron), world_size)


@pytest.mark.parametrize(
    ("values", "megatron"),
    [
        (DENSE, {}),
        (DENSE, {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}),
        (DENSE, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
        (DENSE | {"rope_scaling": {"rope_type": "llama3"}}, {}),
        (DENSE | {"attention_bias": True}, {}),  # which Qwen2 has on query, key and value anyway
        (DENSE | {"layer_types": ["full_attention"] * 4, "use_sliding_window": True}, {}),
        (SPARSE, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}),
        (DENSE, {"context_model_parallel_size": 4, "pipeline_model_parallel_size": 2}),
        (SPARSE, {"context_model_parallel_size": 2, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    ],
)
def test_what_can_be_built_has_no_problem(values: dict, megatron: dict) -> None:
    assert problems(values, **megatron) == []


@pytest.mark.parametrize(
    ("values", "megatron", "expected"),
    [
        (DENSE | {"model_type": "gemma2"}, {}, "'gemma2'; known: llama, qwen2, qwen3, qwen3_moe"),
        (DENSE, {"tensor_model_parallel_size": 3}, "8 ranks cannot be 3 tensor x 1 pipeline x 1 context parallel"),
        (DENSE, {"tensor_model_parallel_size": 8}, "tensor_model_parallel_size=8 does not divide the model's 4 key-value heads"),
        (DENSE | {"num_attention_heads": 6}, {"tensor_model_parallel_size": 4}, "the model's 6 attention heads"),
        (DENSE | {"intermediate_size": 99}, {"tensor_model_parallel_size": 2}, "99 intermediate columns; choose a divisor of 99"),
        (DENSE, {"pipeline_model_parallel_size": 8}, "4 layers cannot be dealt evenly to 8 pipeline ranks x 1 pieces"),
        (
            DENSE,
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4},
            "4 layers cannot be dealt evenly to 2 pipeline ranks x 4 pieces",
        ),
        (DENSE, {"virtual_pipeline_model_parallel_size": 2}, "needs pipeline_model_parallel_size above 1; unset it"),
        (
            DENSE,
            {"context_model_parallel_size": 8},
            "has 4 of the model's 4 key-value heads; choose a divisor of 4",
        ),
        (
            DENSE | {"num_attention_heads": 12},
            {"context_model_parallel_size": 4, "tensor_model_parallel_size": 2},
            "each of the 2 tensor-parallel ranks has 6 of the model's 12 attention heads; choose a divisor of 6",
        ),
        (DENSE, {"expert_model_parallel_size": 2}, "a qwen2 model has no experts; set it to 1"),
        (SPARSE, {"expert_model_parallel_size": 8}, "does not divide the model's 4 experts"),
        (
            SPARSE,
            {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 4},
            "expert_model_parallel_size=4 does not divide the 2 data-parallel ranks (8 ranks / 4)",
        ),
        (SPARSE | {"moe_intermediate_size": 21}, {"tensor_model_parallel_size": 2}, "the experts' 21 columns"),
        (SPARSE, {"tensor_model_parallel_size": 2, "sequence_parallel": False}, "sequence_parallel=False"),
        (SPARSE | {"num_experts_per_tok": 1}, {}, "the normalised weight of a single expert has no gradient"),
        (DENSE | {"model_type": "llama", "attention_bias": True}, {}, "attention_bias=True"),
        (DENSE | {"mlp_bias": True}, {}, "mlp_bias=True"),
        (DENSE | {"hidden_act": "gelu"}, {}, "the activation 'gelu' is not built with megatron (silu is)"),
        (DENSE | {"use_sliding_window": True}, {}, "sliding window"),
        (DENSE | {"layer_types": ["full_attention", "sliding_attention"]}, {}, "sliding window"),
        (DENSE | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, {}, "rotary embeddings of type 'yarn'"),
        (DENSE | {"rope_parameters": {"rope_type": "dynamic"}}, {}, "(default, linear, llama3 are)"),
        (DENSE | {"rope_parameters": {"partial_rotary_factor": 0.5}}, {}, "a part of each head"),
        (
            DENSE,
            {"override_transformer_config": {"params_dtype": "bf16"}},
            "override_transformer_config.params_dtype follows from other settings; set megatron.model_dtype instead",
        ),
    ],
)
def test_what_cannot_be_built_is_said(values: dict, megatron: dict, expected: str) -> None:
    assert any(expected in text for text in problems(values, **megatron)), problems(values, **megatron)


def test_all_problems_are_told_with_their_section() -> None:
    found = megatron_problems(
        DENSE, MegatronConfig(tensor_model_parallel_size=3, expert_model_parallel_size=2), 8, where="critic.megatron"
    )
    assert len(found) == 4  # ranks, heads, key-value heads, no experts; 96 columns divide by 3
    assert all(text.startswith("critic.megatron: ") for text in found)


def test_derived_entries_name_settings_that_exist() -> None:
    assert set(checks.DERIVED.values()) <= {field.name for field in dataclasses.fields(MegatronConfig)}


def test_sparse_layers_are_those_transformers_makes_sparse() -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer, Qwen3MoeSparseMoeBlock

    values = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 4, "num_experts": 2}
    config = Qwen3MoeConfig(**values, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    made = [isinstance(Qwen3MoeDecoderLayer(config, layer).mlp, Qwen3MoeSparseMoeBlock) for layer in range(6)]
    assert sparse_layers(config.to_dict()) == made == [False, True, False, False, False, True]


def test_checks_load_nothing_heavy() -> None:
    heavy = ("torch", "megatron", "transformers")
    code = f"import sys, rlhub.models.megatron.checks; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0
