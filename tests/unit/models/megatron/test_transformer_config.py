from __future__ import annotations

import warnings

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from rlhub.config.sections.training import MegatronConfig
from rlhub.errors import ConfigError
from rlhub.models.megatron.transformer_config import make_transformer_config, rotary_frequencies

SIZES = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def made(hf_config: PreTrainedConfig, *, recompute: bool = False, dtype: torch.dtype = torch.float32, **megatron: object):
    return make_transformer_config(hf_config, MegatronConfig(**megatron), dtype=dtype, recompute=recompute)


def test_families_differ_in_biases_norms_and_head_width() -> None:
    qwen2, llama = made(Qwen2Config(**SIZES)), made(LlamaConfig(**SIZES))
    qwen3 = made(Qwen3Config(**SIZES, head_dim=10))
    assert [config.add_qkv_bias for config in (qwen2, qwen3, llama)] == [True, False, False]
    assert [config.qk_layernorm for config in (qwen2, qwen3, llama)] == [False, True, False]
    assert [config.kv_channels for config in (qwen2, qwen3, llama)] == [6, 10, 6]


def test_experts() -> None:
    hf_config = Qwen3MoeConfig(**SIZES, moe_intermediate_size=20, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[1])
    config = made(hf_config, expert_model_parallel_size=2)
    assert (config.num_moe_experts, config.moe_ffn_hidden_size, config.moe_router_topk) == (4, 20, 2)
    assert config.moe_layer_freq == [1, 0, 1, 1]
    assert config.moe_router_pre_softmax
    hf_config.norm_topk_prob = True
    assert not made(hf_config).moe_router_pre_softmax


@pytest.mark.parametrize(
    ("megatron", "expected"),
    [
        ({}, False),
        ({"sequence_parallel": True}, False),  # nothing to share without tensor parallelism
        ({"tensor_model_parallel_size": 2}, True),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": False}, False),
    ],
)
def test_sequence_parallel_goes_with_tensor_parallel(megatron: dict, expected: bool) -> None:
    assert made(Qwen3Config(**SIZES), **megatron).sequence_parallel is expected


def test_recompute() -> None:
    assert made(Qwen3Config(**SIZES)).recompute_granularity is None
    full = made(Qwen3Config(**SIZES), recompute=True)
    assert (full.recompute_granularity, full.recompute_method, full.recompute_num_layers) == ("full", "uniform", 1)
    selective = made(Qwen3Config(**SIZES), recompute=True, recompute_granularity="selective")
    assert (selective.recompute_granularity, selective.recompute_modules) == ("selective", ["core_attn"])


def test_overrides_reach_megatron_and_wrong_ones_are_told() -> None:
    config = Qwen3Config(**SIZES)
    assert made(config, override_transformer_config={"attention_dropout": 0.25}).attention_dropout == 0.25
    with pytest.raises(ConfigError, match="'attention_dropout'\\?"):
        made(config, override_transformer_config={"atention_dropout": 0.25})
    with pytest.raises(ConfigError, match="Megatron-core refuses"):
        made(config, override_transformer_config={"num_moe_experts": -1})


def test_nothing_is_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(Qwen3Config(**SIZES), recompute=True, recompute_granularity="selective", dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_frequencies_are_the_models(rope: dict) -> None:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**SIZES, rope_parameters=rope)
    assert torch.equal(rotary_frequencies(config), LlamaRotaryEmbedding(config).inv_freq)
