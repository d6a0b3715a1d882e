"""The Megatron-core engine on one, two and four real gloo ranks against a plain Hugging Face loop and the FSDP engine.

One set of four processes serves all tests: each call makes a process group of as many of them as it needs.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration import megatron_checks as checks
from tests.integration.fsdp_ranks import Ranks

TOLERANCE = 1e-5  # relative L2, float32
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_model_parallel_size": 2}
WHOLE = {"use_distributed_optimizer": False}


class Group:
    """Calls a check on the first `world` of the ranks."""

    def __init__(self, folder: Path, ranks: int = 4) -> None:
        self.ranks = Ranks(ranks, preload="tests.integration.megatron_checks")
        self.rendezvous = (str(folder / f"rendezvous{number}") for number in itertools.count())

    def call(self, check: Any, world: int, *args: Any) -> list[Any]:
        return [result for result in self.ranks.call(check, world, next(self.rendezvous), *args) if result is not None]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory):
    made = Group(tmp_path_factory.mktemp("ranks"))
    yield made
    made.ranks.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models: 67 tokens are padded by tensor parallelism, four layers go round two interleaved stages."""
    import torch
    from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen3Config, Qwen3MoeConfig

    from tests.support.tiny_models import save_moved_models

    sizes = {
        "vocab_size": 67,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
    more_heads = sizes | {"num_attention_heads": 8, "num_key_value_heads": 4}  # two ways of cutting them at once
    configs = {
        "qwen2": Qwen2Config(**sizes, tie_word_embeddings=True),
        "qwen3": Qwen3Config(**more_heads, head_dim=6, tie_word_embeddings=False),
        "experts": Qwen3MoeConfig(**sizes, **experts, head_dim=6, tie_word_embeddings=False),
    }
    paths = save_moved_models(configs, tmp_path_factory.mktemp("models"))
    torch.manual_seed(11)
    classifier = AutoModelForSequenceClassification.from_pretrained(paths["qwen2"], num_labels=1)
    classifier.score.weight.data.normal_()
    paths["classifier"] = str(tmp_path_factory.mktemp("models") / "classifier")
    classifier.save_pretrained(paths["classifier"])
    return paths


def assert_agrees(results: list[dict[str, Any]]) -> None:
    """Loss, gradient, its norm, weights after a step and outputs are the plain loop's, on every rank."""
    for result in results:
        assert result["exact"] == 0
        assert result["sums"] == results[0]["sums"]
        for what in ("loss", "gradient", "norm", "weights"):
            assert result[what] <= TOLERANCE, what
        assert result["infer"] <= 5e-6
    collecting = [result["collect"][0] for result in results if result["collect"][2]]
    assert collecting == list(range(results[0]["collect"][1])), "one rank of each model copy stands for it"


@pytest.mark.parametrize("name", [*checks.FSDP, *checks.DENSE])
def test_one_step_agrees_with_a_plain_loop(group: Group, models: dict[str, str], name: str) -> None:
    world, layout = (checks.FSDP | checks.DENSE)[name]
    backend = "fsdp" if name in checks.FSDP else "megatron"
    model = models["qwen3" if "tp2" in name else "qwen2"]
    assert_agrees(group.call(checks.agreement, world, model, "policy", {"backend": backend, "layout": layout}))


@pytest.mark.parametrize("name", [*checks.FSDP, *checks.EXPERTS])
def test_one_step_of_a_mixture_of_experts(group: Group, models: dict[str, str], name: str) -> None:
    world, layout = (checks.FSDP | checks.EXPERTS)[name]
    backend = "fsdp" if name in checks.FSDP else "megatron"
    results = group.call(checks.agreement, world, models["experts"], "policy", {"backend": backend, "layout": layout})
    assert_agrees(results)
    filled = 0.02 if "tp2" in name else 0  # sequence parallel ranks take as many tokens each: some are padding
    for result in results:
        assert result["load"] == pytest.approx(result["plain_load"], abs=filled)
        assert result["load"]["actor/expert_load_max"] > 1.05, "the router of a random model has favourites"


CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "tied": ("qwen2", "policy", 4, {"layout": TP2 | PP2}),  # both ends of the pipeline hold the matrix
    "value": ("qwen3", "value", 4, {"layout": TP2 | PP2}),
    "value_without_sequence_parallel": ("qwen2", "value", 2, {"layout": TP2 | {"sequence_parallel": False}}),
    "reward": ("classifier", "reward", 4, {"layout": TP2 | PP2}),
    "idle_copy_in_a_pipeline": ("qwen2", "policy", 4, {"uneven": True, "layout": PP2, "micro": {"rows": 1}}),
    "idle_copy_of_experts": ("experts", "policy", 2, {"uneven": True, "layout": {"expert_model_parallel_size": 2}}),
    "all_rows": ("qwen2", "policy", 2, {"micro": {}, "layout": PP2}),
    "value_in_contexts": ("qwen2", "value", 2, {"layout": CP2, "model": {"enable_gradient_checkpointing": True}}),
    "reward_in_contexts": (
        "classifier",
        "reward",
        2,
        {"layout": CP2, "micro": {"rows": 1}},
    ),  # ranks without a source or token
    "experts_in_contexts": ("experts", "policy", 4, {"layout": CP2 | {"expert_model_parallel_size": 2}}),
    "recompute": ("qwen3", "policy", 4, {"model": {"enable_gradient_checkpointing": True}, "layout": TP2 | PP2}),
}


@pytest.mark.parametrize("name", CASES)
def test_one_step_of_other_kinds_and_cuts(group: Group, models: dict[str, str], name: str) -> None:
    model, kind, world, case = CASES[name]
    assert_agrees(group.call(checks.agreement, world, models[model], kind, case))


@pytest.mark.parametrize(("damage", "seen"), [("loss", 1e-4), ("weight", 1e-4), ("norms", 1e-4)])
def test_the_comparison_sees_damage(group: Group, models: dict[str, str], damage: str, seen: float) -> None:
    """The controls: a loss scaled by 1.001, one flipped weight, query and key norms whose gradients are not summed."""
    for result in group.call(checks.agreement, 2, models["qwen3"], "policy", {"layout": TP2, "damage": damage}):
        assert result["gradient"] > seen


def test_the_comparison_sees_ranks_that_exchange_nothing(group: Group, models: dict[str, str]) -> None:
    """The control of context parallelism: rows cross the border between the ranks' tokens."""
    for result in group.call(checks.agreement, 2, models["qwen3"], "policy", {"layout": CP2, "damage": "exchange"}):
        assert result["gradient"] > 1e-4


@pytest.fixture(scope="module")
def fsdp_steps(group: Group, models: dict[str, str]) -> dict[str, Any]:
    """What the FSDP engine makes of three steps on two ranks."""
    result: dict[str, Any] = group.call(checks.adam_steps, 2, models["qwen2"], {}, "fsdp")[0]
    return result


ADAM = {"dp2": (2, {}), "tp2xdp2_whole": (4, TP2 | WHOLE)}


@pytest.mark.parametrize("name", ADAM)
def test_adamw_steps_equal_the_fsdp_engines(group: Group, models: dict[str, str], fsdp_steps: dict[str, Any], name: str) -> None:
    world, layout = ADAM[name]
    expected = fsdp_steps
    for result in group.call(checks.adam_steps, world, models["qwen2"], layout):
        assert result["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
        assert result["rates"] == expected["rates"]
        assert relative(result["weights"], expected["weights"]) < TOLERANCE


def relative(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    assert found.keys() == expected.keys()
    error = sum(float(np.square(found[name] - expected[name], dtype=np.float64).sum()) for name in expected)
    return (error / sum(float(np.square(value, dtype=np.float64).sum()) for value in expected.values())) ** 0.5


@pytest.mark.parametrize(
    ("where", "world", "layout"), [("gradient", 2, {}), ("loss", 4, TP2 | PP2)], ids=["gradient-dp2", "loss-tp2xpp2"]
)
def test_not_finite_step_is_skipped_everywhere(
    group: Group, models: dict[str, str], where: str, world: int, layout: dict[str, Any]
) -> None:
    for facts in group.call(checks.not_finite, world, models["qwen2"], layout, where):
        assert facts == {
            "skipped": True,
            "unchanged": True,
            "next": True,
            "scalars": {"optimizer_steps": 1, "skipped_steps": 1},
        }


def test_weights_that_are_not_finite_are_named_on_all_ranks(group: Group, models: dict[str, str]) -> None:
    """Also those of another stage and of another rank's part."""
    first, *others = group.call(checks.infinite_step, 4, models["qwen2"], TP2 | PP2)
    assert len(others) == 3 and all(names == first for names in others)
    assert {"model.embed_tokens.weight", "model.layers.3.mlp.up_proj.weight", "model.norm.weight"} <= set(first)


STREAMS: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "dp2": ("qwen2", 2, {}, 4000),
    "tp2xpp2_each": ("qwen2", 4, TP2 | PP2, 1),
    "tp2xpp2_all": ("qwen2", 4, TP2 | PP2, 1 << 30),
    "ep2xtp2": ("experts", 4, TP2 | {"expert_model_parallel_size": 2}, 4000),
}


@pytest.mark.parametrize("name", STREAMS)
def test_weight_stream_and_pieces(group: Group, models: dict[str, str], name: str) -> None:
    model, world, layout, bucket_bytes = STREAMS[name]
    results = group.call(checks.pieces_and_stream, world, models[model], layout, bucket_bytes)
    for result in results:
        assert result["exact"] and result["live"]
        assert result["buckets"] == results[0]["buckets"]
        assert sorted(name for bucket in result["buckets"] for name, _ in bucket) == result["names"]
        assert all(len(bucket) == 1 or sum(size for _, size in bucket) <= bucket_bytes for bucket in result["buckets"])
        if bucket_bytes == 1 << 30:
            assert len(result["buckets"]) == 1


def test_weight_stream_holds_two_buckets(group: Group, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = Qwen2Config(vocab_size=4096, num_hidden_layers=14, tie_word_embeddings=True, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    bucket = 8 << 20
    for total, peak in group.call(checks.stream_peak, 2, str(tmp_path), TP2, bucket):
        assert total > 7 * bucket
        assert peak <= 2 * bucket
    for total, peak in group.call(checks.stream_peak, 2, str(tmp_path), TP2, 1 << 30):  # the control: all at once is seen
        assert peak > total // 2


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((4, TP2 | PP2, "megatron"), (4, TP2 | WHOLE, "megatron")),
        ((2, {}, "fsdp"), (2, {}, "megatron")),
        ((4, CP2 | PP2, "megatron"), (2, {}, "megatron")),
        ((2, CP2 | WHOLE, "megatron"), (4, CP2, "megatron")),
    ],
    ids=["tp2xpp2-tp2xdp2_whole", "fsdp2-dp2", "cp2xpp2-dp2", "cp2_whole-cp2xdp2"],
)
def test_state_resumes_under_another_layout(
    group: Group, models: dict[str, str], tmp_path: Path, source: tuple[int, Any, str], target: tuple[int, Any, str]
) -> None:
    """Every element is written once, and weights and moments continue the run."""
    world, layout, backend = source
    expected = group.call(checks.save, world, models["qwen2"], layout, str(tmp_path), backend)[0]
    assert expected["once"]
    kinds = {name.partition(".model.")[0] for name in expected["names"]}
    assert kinds == {"model", "optim.exp_avg", "optim.exp_avg_sq"}
    world, layout, backend = target
    for result in group.call(checks.resume, world, models["qwen2"], layout, str(tmp_path), backend):
        assert result["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE)
        assert relative(result["weights"], expected["weights"]) < TOLERANCE


@pytest.mark.parametrize("layout", [{}, WHOLE], ids=["distributed", "whole"])
def test_half_precision_keeps_masters(group: Group, models: dict[str, str], layout: dict[str, Any]) -> None:
    """Saved are the float32 masters; loading brings them into the bfloat16 weights, too."""
    for facts in group.call(checks.half_precision, 2, models["qwen2"], layout):
        assert facts["dtypes"] == {"torch.bfloat16"}
        assert facts["masters"] and facts["model"] and facts["finer"]
        assert facts["norms"] < 0.05


@pytest.mark.parametrize("layout", [{}, WHOLE], ids=["distributed", "whole"])
def test_optimizer_states_are_on_the_device_for_the_step_alone(
    group: Group, models: dict[str, str], layout: dict[str, Any]
) -> None:
    for facts in group.call(checks.hosted_states, 2, models["qwen2"], layout):
        step = {"infer": 0, "stream": 0, "sync": 0, "save": 0, "step": facts["states"]}
        assert facts["counts"] == [step, step] and facts["states"] > 0
        assert facts["same"] == [True, True, True]


@pytest.mark.parametrize(("layout", "copies"), [({}, 4), (TP2, 2), (PP2, 2), (CP2, 2), (TP2 | PP2, 1)])
def test_rows_come_together_over_the_model_copies_alone(
    group: Group, models: dict[str, str], layout: dict[str, Any], copies: int
) -> None:
    """Ranks that share a copy have the same rows: each counts once on every rank, also where a copy has none."""
    for size, numbers, tokens in group.call(checks.gathered, 4, models["qwen3"], layout):
        assert size == copies
        assert np.array_equal(numbers, np.arange(7)) and np.array_equal(tokens, np.arange(7)[:, None] * np.ones(3))


def test_engines_of_a_process_agree_on_their_groups(group: Group, models: dict[str, str]) -> None:
    for message in group.call(checks.other_sizes, 2, models["qwen2"]):
        assert "tensor=2, pipeline=1" in message and "tensor=1, pipeline=2" in message
