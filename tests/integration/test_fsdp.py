"""The FSDP2 engine on 1, 2 and 4 real gloo ranks against a plain Hugging Face loop."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.integration import fsdp_checks as checks
from tests.integration.fsdp_ranks import Ranks

WORLDS = (1, 2, 4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models with awkward sizes: 67 tokens divide by no number of ranks."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    from tests.support.tiny_models import save_moved_models

    sizes = {
        "vocab_size": 67,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    configs = {
        "qwen2": Qwen2Config(**sizes, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**sizes, head_dim=6, tie_word_embeddings=False),
        "llama": LlamaConfig(**sizes, tie_word_embeddings=False),
    }
    return save_moved_models(configs, tmp_path_factory.mktemp("models"))


@pytest.fixture
def classifier(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A sequence classifier with one label and a head of its own."""
    import torch
    from transformers import AutoModelForSequenceClassification

    path = tmp_path_factory.mktemp("models") / "classifier"
    torch.manual_seed(11)
    model = AutoModelForSequenceClassification.from_pretrained(models["qwen2"], num_labels=1)
    model.score.weight.data.normal_()
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"world{world}")
def ranks(request: pytest.FixtureRequest):
    group = Ranks(request.param)
    yield group
    group.close()


RECOMPUTED = {"enable_gradient_checkpointing": True}
GRADIENT_CASES = {
    "whole": {},
    "single_rows": {"micro": {"rows": 1}},
    "pairs": {"micro": {"rows": 2}},
    "tokens": {"micro": {"max_tokens": 20}},
    "padded": {"model": {"use_remove_padding": False}, "micro": {"rows": 2}},
    "idle_rank": {"uneven": True, "micro": {"rows": 2}},
    "checkpointing": {"model": {"enable_gradient_checkpointing": True}, "micro": {"rows": 3}},
    "selective": {"model": RECOMPUTED, "fsdp": {"recompute_granularity": "selective"}, "micro": {"rows": 3}},
    "as_large_model": {"large": True, "micro": {"rows": 2}},
}


def test_compiled_blocks_are_sharded_one_by_one(ranks: Ranks, models: dict[str, str]) -> None:
    """And compute all but products again, in passes over rows of other numbers and lengths."""
    case = {
        "model": RECOMPUTED,
        "fsdp": {"recompute_granularity": "selective", "use_torch_compile": True},
        "large": True,
        "micro": {"rows": 2},
    }
    for error, loss, expected in ranks.call(checks.gradient, models["qwen2"], "policy", case):
        assert error <= 1e-10 and loss == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", ["policy", "value", "reward"])
@pytest.mark.parametrize("case", GRADIENT_CASES)
def test_gradient_does_not_depend_on_the_cut(ranks: Ranks, models: dict[str, str], kind: str, case: str) -> None:
    for error, loss, expected in ranks.call(checks.gradient, models["qwen2"], kind, GRADIENT_CASES[case]):
        assert error <= 1e-10
        assert loss == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("model", ["qwen2", "qwen3", "llama"])
def test_gradient_in_float32(ranks: Ranks, models: dict[str, str], model: str) -> None:
    for error, loss, expected in ranks.call(
        checks.gradient, models[model], "policy", {"dtype": "fp32", "micro": {"max_tokens": 20}}
    ):
        assert error <= 1e-5
        assert loss == pytest.approx(expected, rel=1e-5)


def test_gradient_check_sees_a_small_error(ranks: Ranks, models: dict[str, str]) -> None:
    """The control: one target off by 0.01 is far outside the tolerance."""
    for error, _, _ in ranks.call(checks.gradient, models["qwen2"], "policy", {"damage": True}):
        assert error > 1e-4


@pytest.mark.parametrize("case", ["whole", "single_rows", "tokens", "padded", "idle_rank"])
@pytest.mark.parametrize("kind", ["policy", "value", "reward"])
def test_infer(ranks: Ranks, models: dict[str, str], kind: str, case: str) -> None:
    assert max(ranks.call(checks.inference, models["qwen3"], kind, GRADIENT_CASES[case])) < 1e-12


def test_reward_model_with_its_own_head(ranks: Ranks, classifier: str) -> None:
    """A sequence classifier's head is read from the checkpoint, on all ranks and when rank 0 alone reads it."""
    for case in ({"own_head": True}, {"own_head": True, "large": True, "micro": {"rows": 2}}):
        for error, loss, expected in ranks.call(checks.gradient, classifier, "reward", case):
            assert error <= 1e-10
            assert loss == pytest.approx(expected, rel=1e-10)
    assert max(ranks.call(checks.inference, classifier, "reward", {"own_head": True})) < 1e-12


@pytest.mark.parametrize("pack", [True, False])
def test_reward_of_a_row_depends_on_that_row_alone(ranks: Ranks, classifier: str, pack: bool) -> None:
    assert max(ranks.call(checks.reward_contamination, classifier, pack)) < 1e-12


def test_saved_reward_model_is_a_sequence_classifier(ranks: Ranks, classifier: str, tmp_path: Path) -> None:
    """transformers' own classes and padding give the scores that the engine gave."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from rlhub.config.sections.training import ModelConfig
    from rlhub.models.hf import save_sidecars
    from tests.unit.models.conftest import save_tokenizer

    expected = ranks.call(checks.save_reward, classifier, str(tmp_path))[0]
    save_tokenizer(Path(classifier), eos_token="<eos>", pad_token="<pad>")
    folder = tmp_path / "huggingface"
    save_sidecars(ModelConfig(path=classifier), folder, "reward")
    config = AutoConfig.from_pretrained(folder)
    assert (config.architectures, config.num_labels, config.pad_token_id) == (["Qwen2ForSequenceClassification"], 1, 0)
    rows = checks.make_rows()
    rows["input_ids"] = torch.where(rows["attention_mask"].bool(), rows["input_ids"], config.pad_token_id)
    positions = (rows["attention_mask"].cumsum(1) - 1).clamp(min=0)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        found = model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], position_ids=positions).logits[:, 0]
    assert found.tolist() == pytest.approx(expected, abs=2e-5)
    assert found.std() > 1e-3


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_steps_equal_torch_adamw(ranks: Ranks, models: dict[str, str], model: str, large: bool) -> None:
    for weights, norms in ranks.call(checks.steps_against_torch, models[model], {}, large):
        assert norms < 1e-10
        assert weights < 1e-8


@pytest.mark.parametrize("size", [1, 2])
def test_hybrid_sharding_steps(ranks: Ranks, models: dict[str, str], size: int) -> None:
    if ranks.world < size:
        size = 1
    for weights, norms in ranks.call(checks.steps_against_torch, models["qwen2"], {"fsdp_size": size}, False):
        assert norms < 1e-10
        assert weights < 1e-8


@pytest.mark.parametrize("bucket_bytes", [1, 4000, 1 << 30])
def test_weight_stream(ranks: Ranks, models: dict[str, str], bucket_bytes: int) -> None:
    results = ranks.call(checks.bucket_sizes, models["qwen2"], bucket_bytes)
    for buckets, exact in results:
        assert exact
        assert buckets == results[0][0]
        names = [name for bucket in buckets for name, _ in bucket]
        assert len(names) == len(set(names))
        assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
        assert all(len(bucket) == 1 or sum(size for _, size in bucket) <= bucket_bytes for bucket in buckets)
        if bucket_bytes == 1 << 30:
            assert len(buckets) == 1


def test_weight_stream_holds_two_buckets(ranks: Ranks, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = Qwen2Config(vocab_size=4096, num_hidden_layers=14, tie_word_embeddings=True, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    bucket = 8 << 20
    for total, peak in ranks.call(checks.stream_peak, str(tmp_path), bucket):
        assert total > 7 * bucket
        assert peak <= 2 * bucket
    for total, peak in ranks.call(checks.stream_peak, str(tmp_path), 1 << 30):  # the control: all at once is seen
        assert peak > total // 2 or ranks.world == 1


def test_large_model_is_broadcast_exactly(ranks: Ranks, models: dict[str, str]) -> None:
    for name in ("qwen2", "qwen3"):
        assert all(ranks.call(checks.large_model_is_exact, models[name]))


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("model", ["qwen2", "llama"])
def test_lora(ranks: Ranks, models: dict[str, str], model: str, large: bool) -> None:
    for facts in ranks.call(checks.lora, models[model], large):
        assert facts["as_drawn"] and facts["adapters"] == 2 * 7
        assert facts["moved"] > 1e-3 or ranks.world > 1  # a rank may hold only rows without targets
        assert facts["without"] < 1e-12
        assert facts["merged"] < 1e-12
        assert facts["frozen"] == 0
        rank, layers, in_and_out = 4, 2, [24 + 24, 24 + 12, 24 + 12, 24 + 24, 24 + 36, 24 + 36, 36 + 24]  # q k v o gate up down
        assert facts["trainable"] == layers * rank * sum(in_and_out)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_not_finite_step_is_skipped_everywhere(ranks: Ranks, models: dict[str, str], where: str) -> None:
    for facts in ranks.call(checks.not_finite, models["qwen2"], where):
        assert facts == {
            "skipped": True,
            "unchanged": True,
            "next": True,
            "scalars": {"optimizer_steps": 1, "skipped_steps": 1},
        }


def test_a_weight_that_is_infinite_on_one_rank_is_named_on_all_and_not_saved(
    ranks: Ranks, models: dict[str, str], tmp_path: Path
) -> None:
    for said, names, written in ranks.call(checks.infinite_weight, models["qwen2"], str(tmp_path)):
        assert names == ("model.layers.1.mlp.up_proj.weight",) and f"not finite before the save: {names[0]}" in said
        assert written == []


@pytest.mark.parametrize("kind", ["policy", "value", "reward"])
def test_saved_adapter_is_pefts(ranks: Ranks, models: dict[str, str], tmp_path: Path, kind: str) -> None:
    """peft's own model, given the base model and the adapter folder, computes what the merged weights compute."""
    import torch
    from peft import PeftModel
    from safetensors.torch import load_file

    base = models["qwen2"]
    results = ranks.call(checks.save_adapter, base, kind, str(tmp_path))
    files = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert files <= set(results[0]["files"]) and not any(files & set(result["files"]) for result in results[1:])
    heads = {"policy": set(), "value": {"score.weight"}, "reward": {"score.weight"}}
    assert {one for one in results[0]["trained"] if ".lora_" not in one} == heads[kind]

    torch.manual_seed(1)  # a value model's head that is not in the adapter would be drawn
    merged, plain = checks.plain_model(base, kind, torch.float32), checks.plain_model(base, kind, torch.float32)
    missing, unexpected = merged.load_state_dict(load_file(tmp_path / "huggingface/model.safetensors"), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8.0, base)
    ids = checks.make_rows()["input_ids"][:1]
    with torch.no_grad():
        expected, before = merged.eval()(ids).logits, plain.eval()(ids).logits
        found = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()(ids).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (found - before).abs().max() > 1e-3


@pytest.fixture(scope="module", params=[{}, checks.LORA], ids=["full", "lora"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, models: dict[str, str]):
    """A run saved from two ranks, how it went on, and its model settings."""
    folder = tmp_path_factory.mktemp("saved")
    group = Ranks(2)
    result = group.call(checks.save, models["qwen2"], str(folder), 3, request.param)[0]
    group.close()
    return str(folder), result, request.param


@pytest.mark.parametrize("warm", [False, True])
def test_resume_on_any_number_of_ranks(saved, ranks: Ranks, models: dict[str, str], warm: bool) -> None:
    folder, expected, model = saved
    for result in ranks.call(checks.resume, models["qwen2"], folder, expected["scalars"], warm, model):
        for name, weight in expected["weights"].items():
            if ranks.world == 2:
                assert np.array_equal(result["weights"][name], weight), name
            else:  # sums over ranks are rounded in another order
                assert np.allclose(result["weights"][name], weight, rtol=0, atol=1e-9), name
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-9)
