"""The rollout correction through the FSDP2 engine on real ranks: the gradient of a real (tiny) model is what the formula says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import correction_checks as checks
from tests.integration.fsdp_ranks import Ranks

TIS = {"rollout_is": "token", "rollout_is_threshold": 1.2}
MODES = {
    "tis": TIS,
    "icepop": {"rollout_is": "token", "rollout_is_threshold": "0.7_1.4"},
    "sequence": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "mis": {"rollout_is": "token", "rollout_rs": ["token_k1", "seq_max_k2"], "rollout_rs_threshold": ["0.65_1.5", "0.15"]},
    "bypass": {"bypass_mode": True, "rollout_rs": ["token_k1"], "rollout_rs_threshold": ["0.7_1.4"]},
    "a3po": {"proximal": "a3po", **TIS},
}
CASES = {"tokens": {"micro": {"max_tokens": 20}}, "uneven": {"uneven": True, "micro": {"rows": 1}}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=67, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    made = AutoModelForCausalLM.from_config(config)
    for param in made.parameters():
        param.data.add_(torch.randn_like(param) * 0.1)
    path: Path = tmp_path_factory.mktemp("model")
    made.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module", params=(1, 2), ids=lambda world: f"world{world}")
def ranks(request: pytest.FixtureRequest):
    group = Ranks(request.param)
    yield group
    group.close()


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
@pytest.mark.parametrize("settings", MODES.values(), ids=list(MODES))
def test_the_gradient_is_the_corrected_one(ranks: Ranks, model: str, settings: dict, case: dict) -> None:
    results = ranks.call(checks.gradient, model, settings, checks.GAP, case)
    for result in results:
        assert result["corrected"] < 1e-10
        assert result["uncorrected"] > 1e-2  # what it would be if the correction vanished
        assert result["metrics"] == pytest.approx(results[0]["metrics"])
        assert result["metrics"]["mismatch/weight_min"] < 0.7 and result["metrics"]["mismatch/weight_max"] > 1.3


@pytest.mark.parametrize("settings", [MODES["sequence"], MODES["mis"], MODES["bypass"], MODES["a3po"]])
def test_without_a_mismatch_the_correction_changes_nothing(ranks: Ranks, model: str, settings: dict) -> None:
    for result in ranks.call(checks.gradient, model, settings, 0.0, {}):
        assert result["corrected"] < 1e-10 and result["uncorrected"] < 1e-10
        assert result["metrics"]["mismatch/masked_share"] == 0
        assert result["metrics"]["mismatch/ess"] == pytest.approx(1.0)
