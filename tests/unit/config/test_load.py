"""Overrides and YAML become typed settings; whatever is wrong is named, all of it at once."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhub.config.aliases.keys import FOREIGN
from rlhub.config.aliases.translate import ALIASES
from rlhub.config.load import collect, interpret, load, nearest, validate
from rlhub.config.schema import is_free, leaves, sections
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.errors import ConfigError


def ppo(*overrides: str) -> PPOConfig:
    return load(PPOConfig, "ppo", overrides)


def problems(*overrides: str) -> list[str]:
    """What is wrong with plain key=value settings; past Hydra, which takes a tenth of a second each time."""
    return interpret(PPOConfig, OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides))), []).problems


def test_without_overrides_all_is_default_but_what_is_inherited() -> None:
    config, default = ppo(), PPOConfig()
    assert config.data == default.data
    assert config.actor_rollout_ref.actor == default.actor_rollout_ref.actor
    assert config.trainer.default_local_dir == "checkpoints/rlhub/run"


def test_every_prefix_sets() -> None:
    config = ppo(
        "data.train_batch_size=64", "+data.seed=5", "++trainer.seed=6", "trainer.ray_init.num_cpus=3", "+trainer.ray_init.a=4"
    )
    assert (config.data.train_batch_size, config.data.seed, config.trainer.seed) == (64, 5, 6)
    assert config.trainer.ray_init == {"num_cpus": 3, "a": 4}


def test_values_take_the_type_of_their_setting() -> None:
    config = ppo(
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.entropy_coeff=0",
        "trainer.total_training_steps=1e3",
        "trainer.experiment_name=42",
        "trainer.logger=console",
        'data.train_files=["a.parquet","b.jsonl"]',
        "data.val_files=c.parquet",
        "data.max_prompt_length=1_024",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.rollout.max_model_len=null",
        "algorithm.adv_kwargs={alpha: 0.5, mode: fast}",
        "trainer.ray_init.runtime_env.env_vars.A=b",
    )
    optim = config.actor_rollout_ref.actor.optim
    assert optim.lr == 1e-6
    assert type(config.actor_rollout_ref.actor.entropy_coeff) is float
    assert config.trainer.total_training_steps == 1000 and type(config.trainer.total_training_steps) is int
    assert config.trainer.experiment_name == "42"
    assert config.trainer.logger == ["console"]
    assert config.data.train_files == ["a.parquet", "b.jsonl"] and config.data.val_files == "c.parquet"
    assert config.data.max_prompt_length == 1024
    assert config.actor_rollout_ref.model.enable_gradient_checkpointing is False
    assert config.algorithm.adv_kwargs == {"alpha": 0.5, "mode": "fast"}
    assert config.trainer.ray_init == {"runtime_env": {"env_vars": {"A": "b"}}}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.train_batch_size=abc", ("data.train_batch_size", "'abc'", "int >= 1")),
        ("data.train_batch_size=1.5", ("1.5", "int")),
        ("data.train_batch_size=true", ("True", "int")),
        ("data.train_batch_size=0", ("must be >= 1",)),
        ("data.train_batch_size=null", ("null is not allowed",)),
        ("algorithm.gamma=1.01", (">= 0 and <= 1",)),
        ("algorithm.gamma=.nan", ("out of range",)),
        ("data.shuffle=1", ("true or false",)),
        ("data.truncation=eror", ("one of error, left", "did you mean 'error'")),
        ("actor_rollout_ref.actor.optim=5", ("actor_rollout_ref.actor.optim: got 5", "section")),
        ("trainer.experiment_name=[a]", ("expected string",)),
        ("actor_rollout_ref.actor.strategy=megtron", ("one of fsdp, fsdp2, megatron", "did you mean 'megatron'")),
    ],
)
def test_a_wrong_value_is_named(override: str, parts: tuple[str, ...]) -> None:
    (problem,) = problems(override)
    assert all(part in problem for part in parts), problem


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("data.train_fils", "data.train_files"),
        ("trainer.nnode", "trainer.nnodes"),
        ("algoritm.gamma", "algorithm.gamma"),
        ("actor_rollout_ref.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor.clip_ratio", "actor_rollout_ref.actor.clip_ratio"),
        ("actor_rollout_ref.rolout.temperature", "actor_rollout_ref.rollout.temperature"),
        ("gamma", "algorithm.gamma"),
        ("data.prompt_key.x", "data.prompt_key"),
        ("trainer.n_gpu", "trainer.n_gpus_per_node"),
        ("trainer.total_steps", "trainer.total_training_steps"),
        ("entirely.different", None),
    ],
)
def test_an_unknown_key_gets_the_nearest_full_key(key: str, meant: str | None) -> None:
    (problem,) = problems(f"{key}=1")
    assert problem.startswith(f"{key}: no such setting")
    assert (f"did you mean {meant}" in problem) if meant else ("did you mean" not in problem)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ppo(
            "data.train_fils=x",
            "trainer.nnodes=abc",
            "nonsense",
            "data.seed=1,2",
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            "hydra.run.dir=x",
        )
    assert len(caught.value.problems) == 6
    assert "6 problems" in str(caught.value)


def test_an_unreadable_override_says_what_to_write() -> None:
    hints = {
        "nonsense": "there is no '='",
        "trainer.keep_best=a=b": """for the shell): trainer.keep_best='"a=b"'""",
        "data.seed=1,2": "key=[a,b]",
        "hydra.run.dir=x": "default_local_dir",
        "trainer.experiment_name=${trainer.nothing}": "trainer.nothing",
        "data.prompt_key=???": "required",
    }
    found = collect(PPOConfig, "ppo", list(hints)).problems
    for hint in hints.values():
        assert any(hint in problem for problem in found), (hint, found)
    assert ppo(*shlex.split("""trainer.keep_best='"a=b"'""")).trainer.keep_best == "a=b"


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=null",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.actor.megatron.use_mbridge=True",
        "critic.megatron.use_dist_checkpointing=False",
        "critic.megatron.expert_tensor_parallel_size=null",
        "algorithm.filter_groups.enable=False",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "algorithm.rollout_correction.rollout_is=null",
        "algorithm.rollout_correction.loss_type=ppo_clip",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.multi_turn.tokenization_sanity_check_mode=strict",
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path=null",
        "reward_model.model.path=null",
        "actor_rollout_ref.hybrid_engine=True",
    ],
)
def test_a_foreign_key_at_the_value_that_changes_nothing_is_silent(override: str) -> None:
    assert problems(override) == []


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "sequence parallelism"),
        ("actor_rollout_ref.ref.megatron.dist_checkpointing_path=x", "model.path"),
        ("critic.megatron.use_dist_checkpointing=True", "one format"),
        ("actor_rollout_ref.actor.optim.min_lr=0.1", "min_lr_ratio"),
        ("actor_rollout_ref.ref.strategy=megatron", "actor_rollout_ref.actor.strategy"),
        ("algorithm.rollout_correction.loss_type=pg", "policy_loss.loss_mode"),
        ("actor_rollout_ref.rollout.multi_turn.use_inference_chat_template=True", "were sampled"),
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml", "file.py:Class"),
        ("reward_model.micro_batch_size=8", "_per_gpu"),
        ("reward_model.ulysses_sequence_parallel_size=2", "sequence parallelism"),
        ("reward_model.model.external_lib=verl", "trainer.plugins"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size=8", "_per_gpu"),
    ],
)
def test_a_foreign_key_that_would_matter_is_refused_with_the_reason(override: str, reason: str) -> None:
    (problem,) = problems(override)
    assert problem.startswith(override.partition("=")[0]) and reason in problem


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1", "tensor_model_parallel_size"),
        ("critic.megatron.override_ddp_config.grad_reduce_in_fp32=True", "use_distributed_optimizer"),
        ("actor_rollout_ref.actor.megatron.seed=42", "trainer.seed"),
        ("actor_rollout_ref.rollout.calculate_log_probs=False", "always recorded"),
        ("actor_rollout_ref.actor.megatron.use_torch_compile=True", "fsdp_config.use_torch_compile"),
        ("actor_rollout_ref.model.use_fused_kernels=True", "in chunks"),
        ("actor_rollout_ref.model.torch_dtype=bfloat16", "fsdp_config.model_dtype"),
        ("actor_rollout_ref.rollout.load_format=safetensors", "come from the trainer"),
        ("actor_rollout_ref.rollout.layered_summon=True", "update_weights_bucket_mb"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=['hf_model']", "a Hugging Face folder"),
        ("critic.checkpoint.save_contents=[model]", "a Hugging Face folder"),
        ("reward_model.rollout.gpu_memory_utilization=0.8", "reward_model.micro_batch_size_per_gpu"),
        ("reward_model.use_reward_loop=True", "processes of their own"),
        ("trainer.use_legacy_worker_impl=disable", "one implementation"),
        ("data.return_raw_chat=False", "always carried"),
        ("global_profiler.tool=nsys", "trace.json"),
    ],
)
def test_a_foreign_key_that_changes_nothing_that_is_learned_is_accepted_with_a_warning(override: str, reason: str) -> None:
    loaded = collect(PPOConfig, "ppo", [override])
    (note,) = loaded.notes
    assert loaded.problems == [] and loaded.set_keys == frozenset()
    assert note.startswith(override.partition("=")[0]) and "has no effect: " in note and reason in note


@pytest.mark.parametrize(
    "override",
    [
        "data.return_raw_chat=True",
        "trainer.use_legacy_worker_impl=auto",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]",
        "actor_rollout_ref.ref.strategy=fsdp2 actor_rollout_ref.actor.strategy=fsdp2",
        "data.trust_remote_code=True actor_rollout_ref.model.trust_remote_code=True",
        "reward_model.reward_kwargs.max_resp_len=64 data.max_response_length=64",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=null actor_rollout_ref.actor.optim.warmup_style=constant",
        "data.seed=null custom_reward_function.name=null trainer.total_training_steps=-1",
    ],
)
def test_what_is_the_case_anyway_is_accepted_without_a_word(override: str) -> None:
    loaded = collect(PPOConfig, "ppo", override.split())
    assert (loaded.problems, loaded.notes) == ([], [])


@pytest.mark.parametrize(
    ("override", "instead"),
    [
        ("actor_rollout_ref.rollout.name=sglang", "rollout.name=vllm"),
        ("actor_rollout_ref.rollout.name=sglang", "remote.server=sglang"),
        ("actor_rollout_ref.rollout.name=trtllm", "rollout.name=vllm"),
        ("critic.ulysses_sequence_parallel_size=2", "critic.megatron.context_model_parallel_size"),
        ("trainer.device=npu", "trainer.device=auto"),
        ("reward_model.reward_manager=prime", "reward_model.reward_manager=naive"),
        ("data.trust_remote_code=True", "actor_rollout_ref.model.trust_remote_code"),
    ],
)
def test_what_this_version_does_not_have_is_refused_with_what_to_use_instead(override: str, instead: str) -> None:
    (problem,) = problems(override)
    assert problem.startswith(override) or override.startswith(problem.partition("=")[0])
    assert instead in problem


def test_other_spellings_reach_our_settings() -> None:
    config = ppo(
        "actor_rollout_ref.actor.policy_loss.clip_cov_lb=2",
        "actor_rollout_ref.actor.tau_neg=1.5",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
        "actor_rollout_ref.rollout.update_weights_bucket_megabytes=64",
        "actor_rollout_ref.model.lora.rank=8",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=selective",
        "+actor_rollout_ref.actor.megatron.override_transformer_config.attention_dropout=0.1",
        "reward_model.overlong_buffer.len=16",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.log=False",
        "ray_kwargs.ray_init.num_cpus=4",
        "+ray_init.runtime_env.env_vars.A=b",
        "reward.custom_reward_function.path=reward.py",
    )
    actor = config.actor_rollout_ref.actor
    assert actor.policy_loss.kwargs == {"clip_cov_lb": 2, "tau_neg": 1.5} and actor.fsdp_config.model_dtype == "bf16"
    assert config.actor_rollout_ref.rollout.update_weights_bucket_mb == 64 and config.actor_rollout_ref.model.lora_rank == 8
    assert actor.megatron.recompute_granularity == "selective"
    assert actor.megatron.override_transformer_config == {"attention_dropout": 0.1}
    assert config.reward_model.reward_kwargs == {"overlong_buffer_cfg": {"len": 16}}
    assert config.trainer.ray_init == {"num_cpus": 4, "runtime_env": {"env_vars": {"A": "b"}}}
    assert config.custom_reward_function.path == "reward.py"


def test_keys_of_the_users_own_mappings_stay_as_they_are() -> None:
    tree = {"trainer": {"ray_init": {"runtime_env": {"env_vars": {"A.B": "1", "use_shm": "1"}}}}}
    loaded = interpret(PPOConfig, tree, [])
    assert loaded.problems == [] and loaded.config.trainer.ray_init == tree["trainer"]["ray_init"]


def test_another_frameworks_setting_that_only_follows_another_is_passed_over() -> None:
    """As in a whole configuration file of theirs, where such keys repeat what stands elsewhere."""
    tree = {
        "data": {"max_prompt_length": 64},
        "actor_rollout_ref": {
            "actor": {"_target_": "a.b.C", "rollout_n": "${oc.select:actor_rollout_ref.rollout.n,1}"},
            "ref": {"strategy": "${actor_rollout_ref.actor.strategy}", "ulysses_sequence_parallel_size": "${oc.select:x,1}"},
            "rollout": {"prompt_length": "${oc.select:data.max_prompt_length,512}", "load_format": "${oc.select:x,dummy}"},
        },
    }
    loaded = interpret(PPOConfig, tree, [])
    assert (loaded.problems, loaded.notes, loaded.config.data.max_prompt_length) == ([], [], 64)


def test_every_alias_leads_to_a_setting() -> None:
    known = {leaf.key for cls in (PPOConfig, SFTConfig) for leaf in leaves(cls)}
    known |= {key for cls in (PPOConfig, SFTConfig) for key, _ in sections(cls)}
    free = [leaf.key for leaf in leaves(PPOConfig) if is_free(leaf.annotation)]
    lost = [ours for ours in ALIASES.values() if ours not in known and not any(ours.startswith(f"{name}.") for name in free)]
    assert lost == []


def test_no_row_stands_behind_one_that_covers_all_of_it() -> None:
    """The first row that covers a key decides, so a row for a single key must be reached by that key."""
    assert [row.key for row in FOREIGN if "*" not in row.key and next(r for r in FOREIGN if r.covers(row.key)) is not row] == []
    settings = {leaf.key for leaf in leaves(PPOConfig)}
    assert [row.key for row in FOREIGN if row.key in settings] == []


def test_aliases() -> None:
    assert ppo("critic.model.fsdp_config.param_offload=True").critic.fsdp_config.param_offload is True  # type: ignore[union-attr]
    (problem,) = problems("critic.model.fsdp_config.param_offload=True", "critic.fsdp_config.param_offload=False")
    assert "same setting" in problem
    said = OmegaConf.to_container(
        OmegaConf.from_dotlist(
            [
                "actor_rollout_ref.actor.megatron.context_parallel_size=2",
                "actor_rollout_ref.actor.optim.lr_decay_style=cosine",
                "critic.optim.clip_grad=3",
            ]
        )
    )
    loaded = interpret(PPOConfig, said, [])
    actor = loaded.config.actor_rollout_ref.actor
    assert loaded.problems == [] and loaded.config.critic.grad_clip == 3
    assert (actor.megatron.context_model_parallel_size, actor.optim.lr_scheduler_type) == (2, "cosine")
    sft = interpret(SFTConfig, {"megatron": {"context_parallel_size": 2}}, [])
    assert sft.problems == [] and sft.config.megatron.context_model_parallel_size == 2


def test_replay_of_routing_by_its_other_names() -> None:
    recorded, mode = "actor_rollout_ref.rollout.enable_rollout_routing_replay", "actor_rollout_ref.actor.router_replay.mode"

    def replay(*settings: str) -> str:
        return ppo(*settings).actor_rollout_ref.actor.router_replay

    assert replay(f"{recorded}=True", f"{mode}=R3") == replay(f"{mode}=R3") == replay(f"{recorded}=True") == "rollout"
    assert replay(f"{recorded}=False", f"{mode}=disabled") == replay() == "disabled"
    assert "the same setting with different values" in " ".join(problems(f"{recorded}=True", f"{mode}=disabled"))
    assert "set rollout (R3)" in " ".join(problems(f"{mode}=R2"))
    assert "the policy alone replays experts" in " ".join(problems("actor_rollout_ref.ref.router_replay.mode=R3"))


def test_optional_sections_take_the_rest_from_their_source() -> None:
    config = ppo(
        "actor_rollout_ref.model.path=big",
        "actor_rollout_ref.model.use_remove_padding=False",
        "critic.model.path=small",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    )
    assert config.critic.model is not None and config.actor_rollout_ref.ref.fsdp_config is not None
    assert (config.critic.model.path, config.critic.model.use_remove_padding) == ("small", False)
    assert config.actor_rollout_ref.ref.fsdp_config.param_offload is True
    assert config.actor_rollout_ref.ref.fsdp_config.fsdp_size == 2
    assert config.actor_rollout_ref.actor.fsdp_config.param_offload is False


def test_every_megatron_section_takes_the_rest_from_the_actors() -> None:
    config = ppo(
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.megatron.override_transformer_config.attention_dropout=0.1",
        "actor_rollout_ref.ref.megatron.param_offload=True",
        "critic.megatron.override_transformer_config={}",
    )
    parts = (config.actor_rollout_ref.ref.megatron, config.critic.megatron, config.reward_model.megatron)
    reference, critic, scoring = parts
    assert reference is not None and critic is not None and scoring is not None
    assert [part.tensor_model_parallel_size for part in (reference, critic, scoring)] == [2, 2, 2]
    assert [part.param_offload for part in (reference, critic, scoring)] == [True, False, False]
    assert reference.override_transformer_config == {"attention_dropout": 0.1} and critic.override_transformer_config == {}


def test_own_yaml_builds_on_ours_and_typos_in_it_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo, _self_]\ndata: {train_batch_size: 8}\ntrainer: {seed: 3}\n")
    config = load(PPOConfig, "mine", ["trainer.seed=4"], config_dir=str(tmp_path))
    assert (config.data.train_batch_size, config.trainer.seed) == (8, 4)
    (tmp_path / "typo.yaml").write_text("data: {train_batch_sise: 8}\n")
    with pytest.raises(ConfigError, match=r"data\.train_batch_sise: no such setting; did you mean data\.train_batch_size"):
        load(PPOConfig, "typo", config_dir=str(tmp_path))


def test_groups_of_own_yaml_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "size").mkdir()
    (tmp_path / "size" / "tiny.yaml").write_text("# @package _global_\ndata: {train_batch_size: 8}\n")
    config = load(PPOConfig, "ppo", ["+size=tiny"], config_dir=str(tmp_path))
    assert config.data.train_batch_size == 8


@pytest.mark.parametrize(("folder", "name"), [("/nowhere/at/all", "ppo"), (None, "no_such_name")])
def test_a_missing_file_is_a_config_error(folder: str | None, name: str) -> None:
    with pytest.raises(ConfigError):
        load(PPOConfig, name, config_dir=folder)


def test_set_keys_are_what_the_user_said() -> None:
    assert collect(PPOConfig, "ppo", ["data.seed=1", "+actor_rollout_ref.hybrid_engine=True"]).set_keys == {"data.seed"}


def test_sft_and_validate() -> None:
    config = load(SFTConfig, "sft", ["data.max_length=7", "model.path=x"])
    assert config.data.max_length == 7 and config.optim.lr == 1e-4
    config.data.max_length = -1
    (problem,) = validate(config)
    assert "data.max_length" in problem
    assert validate(PPOConfig()) == []


def test_nearest_is_empty_for_nothing_alike() -> None:
    assert nearest("zzz.qqq", {"data.seed", "trainer.seed"}) == []


@dataclass(slots=True, kw_only=True)
class _Part:
    size: int = 1


@dataclass(slots=True, kw_only=True)
class _Root:
    part: _Part = field(default_factory=_Part)
    anything: Any = None


@pytest.mark.parametrize("cls", [PPOConfig, SFTConfig])
def test_every_setting_is_documented_and_few_enough(cls: type) -> None:
    all_leaves = list(leaves(cls))
    assert [leaf.key for leaf in all_leaves if len(leaf.doc) < 10] == []
    assert len(all_leaves) < 400  # four roles with 14 settings of Megatron each are 56 of them


def test_documentation_check_finds_a_bare_field() -> None:
    assert [leaf.key for leaf in leaves(_Root) if not leaf.doc] == ["part.size", "anything"]
