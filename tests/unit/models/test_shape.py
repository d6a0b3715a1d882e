from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rlhub.errors import ConfigError
from rlhub.models.shape import expert_layers, prefix_problems, read_model_shape, read_model_values, routing_problems


def test_sizes_and_overrides(model_folder: Path) -> None:
    shape = read_model_shape(model_folder, {"max_position_embeddings": 99})
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.vocab_size) == (4, 2, 4, 31)
    assert shape.tied and shape.max_positions == 99 and shape.model_type == "qwen2"


def test_matmul_params_are_those_of_the_model(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    weights = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    assert read_model_shape(model_folder).num_matmul_params == weights + 31 * 16


def test_forward_flops_by_hand(model_folder: Path) -> None:
    shape = read_model_shape(model_folder)
    assert shape.forward_flops(10, 8.0) == 10 * (2 * shape.num_matmul_params + 2 * 2 * 16 * 8)
    assert shape.forward_flops(10, 8.0) - shape.forward_flops(10, 8.0, head=False) == 10 * 2 * 31 * 16


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "not a model folder"), ("{", "as JSON"), (json.dumps({"model_type": "x"}), "num_attention_heads")],
)
def test_errors_name_the_file(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_model_shape(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_loads_no_torch() -> None:
    code = "import sys, rlhub.models.shape; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    ("values", "overrides", "reason"),
    [
        ({}, {}, None),
        ({"attention_dropout": 0.1}, {}, None),  # switched off when the model is loaded
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, {}, None),
        ({"num_experts": 8}, {}, None),
        ({}, {"attention_dropout": 0.1}, "random numbers"),
        ({"layer_types": ["linear_attention", "full_attention"]}, {}, "linear_attention"),
        ({"mamba_d_state": 16}, {}, "mamba_d_state"),
        ({"capacity_factor": 1.25}, {}, "capacity_factor"),
        ({"vision_config": {"depth": 2}}, {}, "images"),
        ({"alibi": True}, {}, "alibi"),
    ],
)
def test_models_whose_rows_cannot_share_prefixes(model_folder: Path, values: dict, overrides: dict, reason: str | None) -> None:
    found = prefix_problems(read_model_values(model_folder) | values, overrides)
    assert len(found) == (reason is not None) and (reason is None or reason in found[0])


def test_whose_routing_can_be_replayed() -> None:
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "num_hidden_layers": 6}
    assert routing_problems(experts) == []
    for part, values in {
        "without experts": {"model_type": "qwen2"},
        "routers of a mixtral are not known": experts | {"model_type": "mixtral"},
        "reads images": experts | {"vision_config": {"depth": 1}},
    }.items():
        (problem,) = routing_problems(values)
        assert part in problem
    assert expert_layers(experts) == [0, 1, 2, 3, 4, 5]
    assert expert_layers(experts | {"mlp_only_layers": [3], "decoder_sparse_step": 2}) == [1, 5]
