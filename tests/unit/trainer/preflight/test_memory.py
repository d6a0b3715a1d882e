"""GPU memory before the start: the arithmetic of parameters, gradients, states and shares against plain numbers, what is refused,
and that commands which fit are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhub.config.rules import placement
from rlhub.config.rules.derive import derive
from rlhub.config.rules.engines import engines
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.models.shape import count_params, read_model_shape
from rlhub.trainer.preflight import checks as preflight
from rlhub.trainer.preflight import memory, model_bytes
from rlhub.trainer.preflight.memory import check_memory, choose_recompute, estimate_memory, warn_of_memory
from tests.support.model_shapes import NUM_PARAMS, SHAPES, save_shape

MODELS = {"0.5b": "Qwen2.5-0.5B", "7b": "Qwen2.5-7B", "32b": "Qwen2.5-32B", "moe": "Qwen3-30B-A3B"}
B7 = 7.615e9
"""Parameters of Qwen2.5-7B, of which norms and biases are a few hundred thousand."""
GIB = 2**30
_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, shape in MODELS.items():
        save_shape(tmp_path / name, shape)


def configured(cls: type[Any], model: str, gpus: int, **values: object) -> Any:
    """A derived configuration on GPUs; values: settings by name, with __ for the dots."""
    config = cls()
    where = config.actor_rollout_ref if cls is PPOConfig else config
    where.model.path = model
    config.trainer.device, config.trainer.n_gpus_per_node = "cuda", gpus
    for path, value in values.items():
        *parents, last = path.split("__")
        node = config
        for name in parents:
            node = getattr(node, name)
        setattr(node, last, value)
    derive(config)
    return config


def grpo(model: str, gpus: int, **values: object) -> Any:
    defaults = {
        "algorithm__adv_estimator": "grpo",
        "actor_rollout_ref__rollout__n": 8,
        "actor_rollout_ref__rollout__name": "vllm",
    }
    return configured(PPOConfig, model, gpus, **{**defaults, **values})


FSDP, ROLLOUT = "actor_rollout_ref__actor__fsdp_config__", "actor_rollout_ref__rollout__"
MEGATRON = {"actor_rollout_ref__actor__strategy": "megatron"}
EXPERT_PARALLEL = {"actor_rollout_ref__actor__megatron__expert_model_parallel_size": 8}


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_counted(shape: str) -> None:
    """Against the numbers on the models' cards; norms, biases and routers are left out."""
    assert count_params(save_shape(Path(shape), shape)) == pytest.approx(NUM_PARAMS[shape], rel=1e-3)


def test_a_head_for_values_is_no_vocabulary() -> None:
    assert count_params("7b") - count_params("7b", language_model=False) == 152064 * 3584


def test_a_model_too_large_for_its_gpu_is_refused_with_the_arithmetic() -> None:
    generates, steps = check_memory(grpo("7b", 1), 79.6)
    size = B7 * 4 / GIB
    assert f"{3 * size:.1f} GiB of {_A}.fsdp_config ({size:.1f} parameters + {2 * size:.1f} optimizer states)" in generates
    assert f"39.8 GiB by {_R}.gpu_memory_utilization=0.5" in generates and "more than its 79.6 GiB" in generates
    assert f"optimizer_offload=true ({2 * size:.1f} GiB)" in generates and "trainer.n_gpus_per_node (more GPUs)" in generates
    assert f"({size:.1f} parameters + {size:.1f} gradients + {2 * size:.1f} optimizer states)" in steps


def test_what_helps_is_told() -> None:
    """Two GPUs hold a step; generation beside it needs an offload, as much less of the memory, or more GPUs."""
    (problem,) = check_memory(grpo("7b", 2), 79.6)
    assert "while the rollout engine generates" in problem and "there is room for 0.46 in all" in problem
    for cure in ({f"{FSDP}optimizer_offload": True}, {f"{FSDP}param_offload": True}, {f"{ROLLOUT}gpu_memory_utilization": 0.46}):
        assert check_memory(grpo("7b", 2, **cure), 79.6) == []
    assert check_memory(grpo("7b", 4), 79.6) == []
    own = {"trainer__pools": {"gen": {"n_gpus_per_node": 2}}, "trainer__placement": {"rollout": "gen"}}
    assert check_memory(grpo("7b", 2, **own), 79.6) == []


def test_an_engine_that_never_gives_its_memory_back_counts_in_the_step() -> None:
    assert check_memory(grpo("7b", 2, **{f"{FSDP}param_offload": True}), 79.6) == []
    turns = {f"{ROLLOUT}mode": "async"}
    assert check_memory(grpo("7b", 2, **{f"{FSDP}param_offload": True}, **turns), 79.6) == []
    ahead = turns | {"trainer__max_staleness": 1}
    processes = turns | {f"{ROLLOUT}name": "vllm_async"}
    for keeps in ({f"{ROLLOUT}free_cache_engine": False}, turns | {f"{ROLLOUT}free_cache_engine": False}, ahead, processes):
        (problem,) = check_memory(grpo("7b", 2, **{f"{FSDP}param_offload": True}, **keeps), 79.6)
        assert "in the optimizer step" in problem and f"{_R}.gpu_memory_utilization" in problem


def test_roles_of_one_process_add_up() -> None:
    """An actor alone fits on four GPUs of 40 GiB; with a critic of the same size and a reference it does not."""
    offloaded = {f"{FSDP}optimizer_offload": True, f"{FSDP}param_offload": True, f"{ROLLOUT}gpu_memory_utilization": 0.4}
    assert check_memory(grpo("7b", 4, **offloaded), 40.0) == []
    alone = {f"{ROLLOUT}gpu_memory_utilization": 0.4}
    assert check_memory(grpo("7b", 4, **alone), 48.0) == []
    ppo = alone | {"algorithm__adv_estimator": "gae"}
    found = check_memory(grpo("7b", 4, **ppo), 48.0)
    assert "critic.fsdp_config.optimizer_offload=true" in found[0] and "actor_rollout_ref.ref" not in found[0]
    found = check_memory(grpo("7b", 4, **ppo, algorithm__use_kl_in_reward=True), 48.0)
    assert "actor_rollout_ref.ref.fsdp_config.param_offload=true" in found[0]


@pytest.mark.parametrize(
    ("megatron", "ranks", "sizes"),
    [
        ({}, 8, (2, 4, 12 / 8)),
        ({"use_distributed_optimizer": False}, 8, (2, 4, 12)),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 8, (2 / 4, 4 / 4, 12 / 8)),
        ({"model_dtype": "fp32"}, 1, (4, 4, 8)),
    ],
)
def test_bytes_of_a_parameter_under_megatron(megatron: dict[str, Any], ranks: int, sizes: tuple[float, float, float]) -> None:
    values = {f"actor_rollout_ref__actor__megatron__{name}": value for name, value in megatron.items()}
    section = grpo("7b", ranks, **MEGATRON, **values).actor_rollout_ref.actor.section
    held = model_bytes.bytes_of(section, 1000, ranks, True)
    assert (held.params, held.grads, held.states) == pytest.approx(tuple(1000 * size for size in sizes))
    assert model_bytes.at_rest(section, held) == held


def test_adapters_have_next_to_no_states() -> None:
    assert check_memory(grpo("7b", 1, actor_rollout_ref__model__lora_rank=16), 79.6) == []


def test_a_judge_keeps_its_share() -> None:
    less = {f"{ROLLOUT}gpu_memory_utilization": 0.4}
    assert check_memory(grpo("7b", 2, **less), 79.6) == []
    (problem,) = check_memory(grpo("7b", 2, **less, reward_model__judge__model__path="judge"), 79.6)
    assert "31.8 GiB by" in problem and "15.9 GiB by reward_model.judge.gpu_memory_utilization=0.2" in problem


def test_an_engine_that_takes_what_it_needs_holds_a_whole_copy_of_the_weights() -> None:
    """It keeps it through the step, on a pool of its own, too; an engine of another job holds nothing here."""
    size = B7 * 2 / GIB
    assert check_memory(grpo("7b", 2, **{f"{ROLLOUT}name": "hf"}), 79.6) == []
    generates, steps = check_memory(grpo("7b", 2, **{f"{ROLLOUT}name": "hf"}), 55.0)
    for problem in (generates, steps):
        assert f"{size:.1f} GiB of the rollout engine's weights ({_R}.name: " in problem and "room for" not in problem
    assert len(check_memory(grpo("7b", 2, **{f"{ROLLOUT}name": "hf", f"{ROLLOUT}dtype": "float32"}), 79.6)) == 1
    assert check_memory(grpo("7b", 2, **{f"{ROLLOUT}name": "remote"}), 57.0) == []
    own = {"trainer__pools": {"gen": {"n_gpus_per_node": 8}}, "trainer__placement": {"rollout": "gen"}, f"{ROLLOUT}name": "hf"}
    assert check_memory(grpo("moe", 32, **own, **MEGATRON, **EXPERT_PARALLEL), 79.6) == []
    (problem,) = check_memory(grpo("moe", 32, **own, **MEGATRON, **EXPERT_PARALLEL), 56.0)
    assert "56.8 GiB of the rollout engine's weights" in problem
    assert problem.endswith(f"; change {_R}.name (vllm cuts the weights over tensor_model_parallel_size GPUs)")


def test_a_share_holds_the_weights_of_its_engine() -> None:
    """65.5 GB of bfloat16 weights do not fit half of a GPU, cut over four of them they do."""
    (problem,) = check_memory(grpo("32b", 32), 79.6)
    assert "has 61.0 GiB of weights" in problem and f"{_R}.gpu_memory_utilization=0.5 of 79.6 GiB is 39.8 GiB" in problem
    assert f"{_R}.tensor_model_parallel_size (more GPUs a copy)" in problem
    assert check_memory(grpo("32b", 32, **{f"{ROLLOUT}tensor_model_parallel_size": 4}), 79.6) == []


def test_models_that_are_not_here_yet_are_not_judged() -> None:
    assert check_memory(grpo("Qwen/Qwen2.5-72B", 1), 79.6) == []


@pytest.mark.parametrize("cls", [SFTConfig, DPOConfig])
def test_supervised_training(cls: type[Any]) -> None:
    """No engine takes a share; DPO holds a reference, too."""
    (problem,) = check_memory(configured(cls, "7b", 1), 79.6)
    assert "in the optimizer step of fsdp_config" in problem
    assert ("GiB of ref_fsdp_config" in problem) == (cls is DPOConfig)
    assert check_memory(configured(cls, "7b", 2), 79.6) == []


def test_documented_commands_fit_on_80_gb() -> None:
    assert check_memory(grpo("0.5b", 1), 79.6) == []
    assert check_memory(grpo("0.5b", 1, algorithm__adv_estimator="gae", algorithm__use_kl_in_reward=True), 79.6) == []
    assert check_memory(grpo("0.5b", 8, **MEGATRON), 79.6) == []


def test_the_checks_before_a_start_ask_for_this_machines_gpus(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"prompt": "1", "data_source": "exact", "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {}}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    for name, value in {"count_gpus": 1, "torch_has_cuda": True, "driver_problem": None, "gpu_memory_gb": 79.6}.items():
        monkeypatch.setattr(preflight, name, lambda value=value: value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = preflight.check_training(grpo("7b", 1, data__train_files="rows.jsonl", data__val_files="rows.jsonl"))
    assert len(found) == 2 and all(problem.startswith("GPU memory: ") for problem in found)
    settings = {"data__train_files": "rows.jsonl", "data__val_files": "rows.jsonl", "data__train_batch_size": 8}
    with caplog.at_level("INFO"):
        assert preflight.check_training(grpo("0.5b", 1, **settings, actor_rollout_ref__actor__ppo_mini_batch_size=8)) == []
    assert [text.split(": ")[1] for text in caplog.messages if text.startswith("memory")] == ["generation", "update of actor"]
    monkeypatch.setattr(preflight, "gpu_memory_gb", lambda: None)  # no nvidia-smi: nothing is known
    assert preflight.check_training(grpo("7b", 1, data__train_files="rows.jsonl", data__val_files="rows.jsonl")) == []


# --- the estimate of each moment ---------------------------------------------------------------------------------------------


def test_the_constants_of_the_engines_are_theirs() -> None:
    """The estimate loads no torch, so it has copies."""
    from rlhub.engines.training.fsdp import engine, logprob

    assert model_bytes.LOGITS == logprob.CHUNK_ELEMENTS
    assert model_bytes.WHOLE_GRADIENT_BYTES == engine.UNSHARDED_GRAD_BYTES


def test_a_line_for_each_moment_of_each_pool() -> None:
    size = B7 * 4 / 4 / GIB
    generation, update = estimate_memory(grpo("7b", 4), 79.6)
    assert generation.startswith(
        f"memory estimate: generation: actor {3 * size:.1f} GiB ({size:.1f} parameters + {2 * size:.1f} "
    )
    assert generation.endswith(f"optimizer states) + vllm 39.8 GiB = {3 * size + 39.8:.1f} GiB of 79.6")
    assert update.startswith("memory estimate: update of actor: actor ") and "a pass of 16,384 tokens) of 79.6" in update
    own = {"trainer__pools": {"gen": {"n_gpus_per_node": 2}}, "trainer__placement": {"rollout": "gen"}}
    lines = estimate_memory(grpo("7b", 4, **own, algorithm__adv_estimator="gae"), None)
    assert [line.split(": ")[1] for line in lines] == ["update of actor", "update of critic", "generation on pool gen"]
    assert "critic " in lines[0] and lines[2].endswith("vllm 0.5 of all of a GPU")
    (line,) = estimate_memory(configured(SFTConfig, "7b", 2), 79.6)
    assert line.startswith("memory estimate: update of model: model ") and "vllm" not in line


@pytest.mark.parametrize("model", ["0.5b", "7b"])
def test_quantized_weights_take_a_byte_and_a_scale_for_each_block(model: str) -> None:
    shape = read_model_shape(model)
    kv = shape.num_kv_heads * shape.head_dim
    layer = 2 * shape.hidden_size * (shape.num_heads * shape.head_dim + kv) + 3 * shape.hidden_size * shape.intermediate_size
    vocabulary = (1 if shape.tied else 2) * shape.vocab_size * shape.hidden_size
    values = {f"{ROLLOUT}quantization": "fp8", f"{ROLLOUT}dtype": "bfloat16"}
    expected = shape.num_layers * layer * (1 + 4 / 128**2) + 2 * vocabulary
    (share,) = memory.tenants_of(grpo(model, 1, **values))[placement.MAIN].shares
    assert share.weights == pytest.approx(expected)
    on_cpu = grpo(model, 1, **values, **{f"{ROLLOUT}name": "hf", "trainer__device": "cpu"})
    assert f" + hf {expected / GIB:.1f} GiB" in estimate_memory(on_cpu, None)[0]
    plain = memory.tenants_of(grpo(model, 1))[placement.MAIN].shares[0].weights
    assert plain - share.weights == pytest.approx(shape.num_layers * layer * (1 - 4 / 128**2))


def test_bytes_of_a_pass() -> None:
    """In half precision a layer keeps 8 hidden sizes of norms, 2 of queries and outputs, 2 of keys and values, 4 of the MLP."""
    config = grpo("7b", 8)
    (engine, *_) = engines(config)
    shape = read_model_shape("7b")
    layer = 2 * (8 * 3584 + 2 * 3584 + 2 * 4 * 128 + 4 * 18944)
    gradients = 2 * (4 * 3584 + 2 * 18944)
    chunk = 2 * (1 << 27) * 4 + 152064 * 3584 * (4 + 2)
    found = {}
    for checkpointing in (True, False):
        config.actor_rollout_ref.model.enable_gradient_checkpointing = checkpointing
        found[checkpointing] = [model_bytes.pass_bytes(engine, shape, 16384, device="cuda", head=head) for head in (False, True)]
    config.actor_rollout_ref.model.enable_gradient_checkpointing = True
    config.actor_rollout_ref.actor.fsdp_config.recompute_granularity = "selective"
    products = 2 * (
        2 * 3584 + 3584 + 3584 + 2 * 4 * 128 + 2 * 18944
    )  # two of each block's ends, q and attention, k and v, the MLP
    selective = model_bytes.pass_bytes(engine, shape, 16384, device="cuda", head=False)
    assert selective == pytest.approx(16384 * (28 * (2 * 3584 + products) + layer - products + gradients))
    kept = 16384 * 28 * 2 * 3584
    assert found[True] == pytest.approx([kept + 16384 * (layer + gradients), kept + max(16384 * (layer + gradients), chunk)])
    assert found[False] == pytest.approx([16384 * (28 * layer + gradients), 16384 * 28 * layer + chunk])


@pytest.mark.parametrize(("tokens", "way"), [(1024, "none"), (8192, "selective"), (16384, "full"), (1 << 20, "full")])
def test_auto_is_the_least_recomputation_that_fits(tokens: int, way: str, caplog: pytest.LogCaptureFixture) -> None:
    """And what is chosen is what the estimate then counts, below the share of the GPU that it may fill unless nothing fits."""
    config = grpo("7b", 4, actor_rollout_ref__actor__ppo_max_token_len_per_gpu=tokens, data__max_response_length=tokens)
    section = config.actor_rollout_ref.actor.fsdp_config
    with caplog.at_level("INFO"):
        choose_recompute(config, 79.6)
    assert section.recompute_granularity == way and f"fsdp_config.recompute_granularity=auto is {way}" in caplog.text
    sizes = {}
    for section.recompute_granularity in ("none", "selective", "full"):
        sizes[section.recompute_granularity] = memory._update_bytes(config, f"{_A}.fsdp_config", 79.6)
    ways = list(sizes)
    assert [size <= 0.9 * 79.6 * GIB for size in sizes.values()][: ways.index(way)] == [False] * ways.index(way)
    assert sizes["none"] > sizes["selective"] > sizes["full"]


def test_a_choice_of_the_user_stays() -> None:
    chosen = grpo("7b", 4, **{f"{FSDP}recompute_granularity": "full"})
    off = grpo("7b", 4, actor_rollout_ref__model__enable_gradient_checkpointing=False)
    choose_recompute(chosen, 1e6)
    choose_recompute(off, 1e6)
    assert chosen.actor_rollout_ref.actor.fsdp_config.recompute_granularity == "full"
    assert off.actor_rollout_ref.actor.fsdp_config.recompute_granularity == "auto"


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({}, 16384),
        ({"actor_rollout_ref__actor__ppo_max_token_len_per_gpu": 8192}, 8192),
        ({"actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 2}, 2 * (512 + 512)),
        ({"actor_rollout_ref__actor__ppo_mini_batch_size": 1, "data__max_prompt_length": 24}, 2 * (24 + 512)),
    ],
)
def test_tokens_of_the_largest_pass(values: dict[str, Any], tokens: int) -> None:
    """The limit, or what a rank has of a small mini-batch: 8 samples over 4 ranks."""
    defaults = {"data__max_prompt_length": 512, "data__max_response_length": 512}
    config = grpo("7b", 4, **(defaults | values))
    assert model_bytes.largest_pass(config, engines(config)[0], 4).num_tokens == tokens
    assert f"a pass of {tokens:,} tokens" in estimate_memory(config, 79.6)[1]


def test_a_pass_that_would_not_fit_is_a_warning_with_what_helps() -> None:
    """Rows may be shorter, so it is no refusal; what is named helps."""
    more = {"actor_rollout_ref__model__enable_gradient_checkpointing": False}
    assert check_memory(grpo("7b", 4, **more), 79.6) == []
    (sentence,) = warn_of_memory(grpo("7b", 4, **more), 79.6)
    limit, checkpointing = f"{_A}.ppo_max_token_len_per_gpu (less)", "actor_rollout_ref.model.enable_gradient_checkpointing=true"
    assert "an update of actor with rows of full length needs actor" in sentence and sentence.endswith(
        f"{limit} or {checkpointing}"
    )
    assert warn_of_memory(grpo("7b", 4), 79.6) == []
    assert warn_of_memory(grpo("7b", 4, **more, actor_rollout_ref__actor__ppo_max_token_len_per_gpu=4096), 79.6) == []


def test_states_that_are_offloaded_come_when_no_pass_is_there() -> None:
    """The larger of both counts: 28.4 GiB of states with two GPUs, and with a longer pass the activations."""
    offloaded = {f"{FSDP}optimizer_offload": True}
    line = estimate_memory(grpo("7b", 2, **offloaded), 79.6)[1]
    assert "optimizer states" in line and "a pass" not in line
    line = estimate_memory(grpo("7b", 2, **offloaded, actor_rollout_ref__model__enable_gradient_checkpointing=False), 79.6)[1]
    assert "optimizer states" not in line and "a pass" in line


def test_on_cpu_a_process_has_the_engines_weights_and_cache() -> None:
    config = grpo("0.5b", 1, trainer__device="cpu", **{f"{ROLLOUT}kv_cache_gb": 3.0})
    size = count_params("0.5b") * 4 / GIB
    generation, update = estimate_memory(config, None)
    assert generation.endswith(f"+ vllm {size + 3:.1f} GiB = {4 * size + 3:.1f} GiB in a process") and "vllm" in update
