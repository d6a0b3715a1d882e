"""Megatron-core models on 4 real gloo ranks against the plain Hugging Face models they were read from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlhub.protocol.weights.pieces import intersection, num_elements, take
from tests.integration import megatron_model_checks as checks
from tests.integration.fsdp_ranks import Ranks

TP2, PP2, EP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {"expert_model_parallel_size": 2}
LAYOUTS = {
    "single": {},
    "tp2": TP2 | {"sequence_parallel": False},
    "tp2_sp": TP2,
    "pp2": PP2,
    "tp2_pp2": TP2 | PP2,
    "vpp": PP2 | {"virtual_pipeline_model_parallel_size": 2},
    "ep2": EP2,
    "tp2_ep2": TP2 | EP2,
    "pp2_ep2": PP2 | EP2,
}
CASES = [
    *(("qwen2", name) for name in ("single", "tp2", "tp2_sp", "pp2", "tp2_pp2", "vpp")),
    *(("qwen3", name) for name in ("single", "tp2", "tp2_sp", "pp2", "tp2_pp2")),
    *(("llama", name) for name in ("tp2_sp", "pp2")),
    *(("qwen3_moe", name) for name in ("single", "tp2_sp", "pp2", "ep2", "tp2_ep2", "pp2_ep2", "vpp")),
    *(("moe_unnormalised", name) for name in ("tp2_ep2",)),
]
GRADIENT_CASES = [
    ("qwen2", "pp2", {}),
    ("qwen2", "tp2_pp2", {}),
    ("qwen3", "tp2", {}),
    ("qwen3", "tp2_sp", {"enable_gradient_checkpointing": True}),
    ("qwen3", "vpp", {}),
    ("qwen3_moe", "tp2_ep2", {}),
    ("qwen3_moe", "pp2_ep2", {"enable_gradient_checkpointing": True}),
]
EXACT = 2e-6  # of the largest output: float32's rounding in another order


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models with awkward sizes; the mixture of experts has a dense layer and files of several shards."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    sizes = {
        "vocab_size": checks.VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 6,
        "max_position_embeddings": 64,
    }
    experts = {"moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [1]}
    rope = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    configs = {
        "qwen2": Qwen2Config(**sizes | {"hidden_size": 48}, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**sizes, tie_word_embeddings=False),
        "llama": LlamaConfig(**sizes, rope_parameters={**rope, "original_max_position_embeddings": 16}),
        "qwen3_moe": Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=True),
        "moe_unnormalised": Qwen3MoeConfig(**sizes, **experts, norm_topk_prob=False, tie_word_embeddings=True),
    }
    paths = {}
    for name, config in configs.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        for param in model.parameters():  # away from the zeros and ones of a fresh model
            param.data.add_(torch.randn_like(param) * 0.1)
        paths[name] = str(tmp_path_factory.mktemp("models") / name)
        model.save_pretrained(paths[name], max_shard_size="40KB" if name == "qwen3_moe" else "1GB")
    assert len(list(Path(paths["qwen3_moe"]).glob("*.safetensors"))) > 1
    return paths


@pytest.fixture(scope="module")
def ranks():
    group = Ranks(4, preload="tests.integration.megatron_model_checks")
    yield group
    group.close()


def plain_model(path: str):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def plain_outputs(model) -> torch.Tensor:
    """Row by row, without any packing."""
    return torch.cat([model(row[None], use_cache=False).logits[0] for row in checks.some_ids().split(checks.LENGTHS)])


def stored(path: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in Path(path).glob("*.safetensors") for name, tensor in load_file(file).items()}


def whole_tensors(held: list[list[tuple]]) -> dict[str, torch.Tensor]:
    """Full tensors from all ranks' boxes: complete, equal where several ranks have the same, disjoint inside a rank."""
    full: dict[str, torch.Tensor] = {}
    seen: dict[str, torch.Tensor] = {}
    for boxes in held:
        for i, (name, shape, region, data) in enumerate(boxes):
            assert not any(other[0] == name and intersection(other[2], region) for other in boxes[:i]), f"{name} overlaps"
            have = full.setdefault(name, torch.zeros(shape))
            mask = seen.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            assert tuple(have.shape) == tuple(shape)
            old = take(mask, region)
            torch.testing.assert_close(take(have, region)[old], data[old], rtol=1e-5, atol=1e-5, msg=f"{name}: replicas differ")
            take(have, region).copy_(data)
            old.fill_(True)
            assert num_elements(region) == data.numel()
    gaps = [name for name, mask in seen.items() if not bool(mask.all())]
    assert not gaps, f"nobody has all of {gaps}"
    return full


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).abs().max()) <= EXACT * float(expected.abs().max())


@pytest.mark.parametrize(("family", "name"), CASES)
def test_outputs_and_weights_are_the_plain_models(family: str, name: str, models: dict[str, str], ranks: Ranks) -> None:
    results = ranks.call(checks.outputs_and_boxes, models[family], LAYOUTS[name])
    with torch.no_grad():
        expected = plain_outputs(plain_model(models[family]))
    found = [out for out, _ in results if out is not None]
    assert len(found) == (2 if "pp2" in name or name == "vpp" else 4)
    assert all(close(out, expected) for out in found)
    weights, files = whole_tensors([boxes for _, boxes in results]), stored(models[family])
    assert weights.keys() == files.keys()
    assert all(torch.equal(weights[key], files[key]) for key in files)


def test_packed_rows_equal_single_rows(models: dict[str, str], ranks: Ranks) -> None:
    for packed, alone in ranks.call(checks.rows_alone, models["qwen3"], TP2 | PP2):
        assert (packed is None) == (alone is None)
        assert packed is None or close(packed, alone)


@pytest.mark.parametrize("damage", ["one_weight", "swapped_groups"])
def test_damage_is_noticed(damage: str, models: dict[str, str], ranks: Ranks) -> None:
    results = ranks.call(checks.damaged, models["qwen2"], TP2, damage)
    with torch.no_grad():
        expected = plain_outputs(plain_model(models["qwen2"]))
    assert not close(results[0], expected)


def test_a_rank_that_is_missing_is_noticed(models: dict[str, str], ranks: Ranks) -> None:
    held = [boxes for _, boxes in ranks.call(checks.outputs_and_boxes, models["qwen2"], TP2)]
    with pytest.raises(AssertionError, match="nobody has all of"):
        whole_tensors(held[::2])


def plain_gradients(model, scores: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the sum of outputs times `loss_weights`, under the checkpoint's names."""
    (scores * checks.loss_weights(scores.shape[-1])).sum().backward()
    grads = {}
    for name, param in model.named_parameters():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(param.grad):
                gate, up = both.chunk(2)
                grads |= {name.replace("gate_up_proj", f"{expert}.gate_proj.weight"): gate}
                grads |= {name.replace("gate_up_proj", f"{expert}.up_proj.weight"): up}
        elif name.endswith("experts.down_proj"):
            grads |= {name.replace("down_proj", f"{e}.down_proj.weight"): grad for e, grad in enumerate(param.grad)}
        else:
            grads[name] = param.grad
    return grads


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert float((found[name] - grad).norm()) <= 1e-5 * float(grad.norm()), name


@pytest.mark.parametrize(("family", "name", "changes"), GRADIENT_CASES)
def test_gradients_are_the_plain_models(family: str, name: str, changes: dict, models: dict[str, str], ranks: Ranks) -> None:
    found = whole_tensors(ranks.call(checks.gradients, models[family], LAYOUTS[name], "policy", changes))
    model = plain_model(models[family])
    assert_same_gradients(found, plain_gradients(model, plain_outputs(model)))


@pytest.mark.parametrize("name", ["tp2", "tp2_sp", "pp2"])
def test_value_models_start_from_the_same_head(name: str, models: dict[str, str], ranks: Ranks) -> None:
    from rlhub.config.sections.training import ModelConfig
    from rlhub.models.hf import build_model

    quiet = ModelConfig(path=models["qwen3"], enable_gradient_checkpointing=False)
    plain = build_model(quiet, "value", dtype=torch.float32, attention="sdpa", seed=5)
    rows = [plain.base_model(row[None], use_cache=False)[0][0] for row in checks.some_ids().split(checks.LENGTHS)]
    scores = torch.cat(rows) @ plain.score.weight.t()
    results = ranks.call(checks.outputs_and_boxes, models["qwen3"], LAYOUTS[name], "value")
    weights = whole_tensors([boxes for _, boxes in results])
    assert torch.equal(weights["score.weight"], plain.score.weight)
    assert weights.keys() == {key for key, _ in plain.named_parameters()}
    found = [out for out, _ in results if out is not None]
    assert found
    assert all(close(out, scores.detach()) for out in found)
    grads = whole_tensors(ranks.call(checks.gradients, models["qwen3"], LAYOUTS[name], "value"))
    assert_same_gradients(grads, plain_gradients(plain, scores))
