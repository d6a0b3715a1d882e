"""Recorded experts: the hf rollout records what its routers choose, and training engines compute as a plain loop does that is
told the same experts, whatever cuts rows, tokens, layers and experts over passes and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration import router_replay_checks as checks
from tests.integration.test_megatron_engine import CP2, PP2, TP2, Group

TOLERANCE = 1e-5
FSDP = {"backend": "fsdp"}
RECOMPUTE = {"model": {"enable_gradient_checkpointing": True}}
EP2 = {"expert_model_parallel_size": 2}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(tmp_path_factory.mktemp("ranks"), ranks=2)
    yield made
    made.ranks.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """all: experts in every layer; some: not in the second; shared: an expert beside them for all tokens, in every other layer;
    many: so many that some are nearly as good as others."""
    from transformers import Qwen2MoeConfig, Qwen3MoeConfig

    from tests.support.tiny_models import save_moved_models

    sizes = {
        "vocab_size": 67,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,  # bfloat16 kernels want rows of whole 16 bytes
    }
    configs = {
        "all": Qwen3MoeConfig(**sizes, head_dim=6, norm_topk_prob=True),
        "some": Qwen3MoeConfig(**sizes, head_dim=6, norm_topk_prob=False, mlp_only_layers=[1]),
        "many": Qwen3MoeConfig(**sizes | {"num_experts": 16, "num_experts_per_tok": 4}, head_dim=6, norm_topk_prob=True),
        "shared": Qwen2MoeConfig(**sizes, norm_topk_prob=False, shared_expert_intermediate_size=12, decoder_sparse_step=2),
    }
    return save_moved_models(configs, tmp_path_factory.mktemp("models"))


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fsdp": ("all", 1, FSDP),
    "fsdp_shared_expert": ("shared", 1, FSDP),
    "fsdp_two_ranks": ("some", 2, FSDP),
    "fsdp_idle_rank": ("some", 2, FSDP | {"uneven": True}),
    "fsdp_padded": ("some", 1, FSDP | {"model": {"use_remove_padding": False}}),
    "fsdp_recompute": ("some", 1, FSDP | RECOMPUTE | {"micro": {"rows": 2}}),
    "megatron": ("some", 1, {}),
    "megatron_recompute": ("all", 1, RECOMPUTE | {"micro": {"rows": 2}}),
    "tensor": ("all", 2, {"layout": TP2}),
    "context": ("some", 2, {"layout": CP2}),
    "experts": ("some", 2, {"layout": EP2, "uneven": True}),
    "pipeline_recompute": ("some", 2, {"layout": PP2} | RECOMPUTE),
    "interleaved": ("all", 2, {"layout": PP2 | {"virtual_pipeline_model_parallel_size": 2}} | RECOMPUTE),
}


@pytest.mark.parametrize("name", CASES)
def test_passes_compute_with_the_recorded_experts(group: Group, models: dict[str, str], name: str) -> None:
    """Random experts, for some tokens none: log-probs and gradients of a plain loop that is told them, the load of experts too,
    and of a loop that is told nothing where rows come without."""
    model, world, case = CASES[name]
    for result in group.call(checks.agreement, world, models[model], case):
        assert result["infer"] < TOLERANCE and result["gradient"] < TOLERANCE and result["without"] < TOLERANCE
        assert result["moved"] > 0.05 or case.get("uneven"), "the recorded experts are others than the routers'"
        if name != "fsdp_padded":  # padding has a load too, as have the single tokens that ranks without rows pass
            assert result["load"] == pytest.approx(result["plain_load"], abs=0.03)


@pytest.mark.parametrize("case", [FSDP, {}], ids=["fsdp", "megatron"])
def test_replay_of_the_own_choices_changes_nothing(group: Group, models: dict[str, str], case: dict[str, Any]) -> None:
    (result,) = group.call(checks.agreement, 1, models["some"], case | {"given": "own"})
    assert result["infer"] < TOLERANCE and result["gradient"] < TOLERANCE and result["moved"] == 0


@pytest.mark.parametrize("case", [FSDP, {}], ids=["fsdp", "megatron"])
def test_experts_of_other_tokens_are_seen(group: Group, models: dict[str, str], case: dict[str, Any]) -> None:
    """The control: choices shuffled over the tokens of a row."""
    (result,) = group.call(checks.agreement, 1, models["some"], case | {"given": "shuffled"})
    assert result["infer"] > 0.05 and result["gradient"] > 0.05


def test_other_experts_in_the_backward_pass_are_seen(group: Group, models: dict[str, str]) -> None:
    """The control of recomputation: what is computed again takes experts of other tokens."""
    for result in group.call(checks.agreement, 2, models["some"], {"layout": PP2, "damage": True} | RECOMPUTE):
        assert result["infer"] < TOLERANCE < 0.05 < result["gradient"]


def test_hf_rollout_and_fsdp2_are_one_function(group: Group, models: dict[str, str]) -> None:
    """In float32 with replay the two differ by rounding alone; recorded experts are those of a whole forward pass."""
    (found,) = group.call(checks.rollout, 1, models["some"], "float32")
    assert found["different"] == 0 and found["on"] < TOLERANCE
    assert found["shuffled"] > 1000 * found["on"]


def test_replay_leaves_the_mismatch_of_rounding_alone(group: Group, models: dict[str, str]) -> None:
    """A rollout in bfloat16 chooses other experts for some tokens than the trainer in float32."""
    (found,) = group.call(checks.rollout, 1, models["many"], "bfloat16")
    assert found["different"] > 0 and found["on"] < 0.5 * found["off"] < found["shuffled"]
