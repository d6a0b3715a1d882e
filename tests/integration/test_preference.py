"""Training on pairs on 1 and 2 real gloo ranks against plain transformers on unpadded single rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import preference_checks as checks
from tests.integration.fsdp_ranks import Ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A policy and the reference it came from: 67 tokens divide by no number of ranks."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=67,
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    paths: list[str] = []
    for name in ("reference", "policy"):
        for param in model.parameters():
            param.data.add_(torch.randn_like(param) * 0.1)
        path: Path = tmp_path_factory.mktemp("models") / name
        model.save_pretrained(path)
        paths.append(str(path))
    return paths[1], paths[0]


@pytest.fixture(scope="module", params=(1, 2), ids=lambda world: f"world{world}")
def ranks(request: pytest.FixtureRequest):
    group = Ranks(request.param)
    yield group
    group.close()


CASES = {
    "whole": {},
    "single_pairs": {"micro": {"rows": 2}},
    "one_row_is_a_pair": {"micro": {"rows": 1}},
    "three_rows_are_a_pair": {"micro": {"rows": 3}},
    "tokens": {"micro": {"max_tokens": 24}},
    "fewer_tokens_than_a_pair": {"micro": {"max_tokens": 5}},
    "padded": {"model": {"use_remove_padding": False}, "micro": {"rows": 4}},
    "idle_rank": {"uneven": True, "micro": {"rows": 2}},
    "checkpointing": {"model": {"enable_gradient_checkpointing": True}, "micro": {"rows": 6}},
    "as_large_model": {"large": True, "micro": {"rows": 4}},
}


@pytest.mark.parametrize("kind", ["policy", "reward"])
@pytest.mark.parametrize("case", CASES)
def test_gradient_does_not_depend_on_ranks_or_cuts(ranks: Ranks, models: tuple[str, str], kind: str, case: str) -> None:
    for found in ranks.call(checks.gradient, *models, kind, CASES[case]):
        assert found["error"] <= 1e-10
        assert found["loss"] == pytest.approx(found["expected"], rel=1e-10)
        assert found["evaluated"] == pytest.approx(found["expected"], rel=1e-10)
        assert found["count"] == 7 and found["margins"] < 1e-10


@pytest.mark.parametrize("kind", ["policy", "reward"])
def test_the_check_sees_one_other_token(ranks: Ranks, models: tuple[str, str], kind: str) -> None:
    for found in ranks.call(checks.gradient, *models, kind, {"damage": True}):
        assert found["error"] > 1e-4


def test_the_check_sees_a_local_denominator(ranks: Ranks, models: tuple[str, str]) -> None:
    """7 pairs over 2 ranks are 4 and 3: a mean over each rank's own would weigh them differently."""
    for found in ranks.call(checks.gradient, *models, "policy", {"local": True}):
        assert (found["error"] > 1e-3) == (ranks.world > 1)


def test_dpo_starts_at_log_two(ranks: Ranks, models: tuple[str, str]) -> None:
    """Where policy and reference are one, though their passes are cut differently."""
    assert max(map(abs, ranks.call(checks.distance_from_log_two, models[0]))) < 1e-12
