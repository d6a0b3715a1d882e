"""Settings that follow from others are filled; the user's own stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlhub.config.rules import checks
from rlhub.config.rules import derive as derive_rules
from rlhub.config.rules.derive import derive
from rlhub.config.schema import leaves
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.sft import SFTConfig

Change = Callable[[PPOConfig], None]


def put(config: object, **values: object) -> None:
    """put(config, a__b=1) sets config.a.b, also where the section is a fresh default."""
    for path, value in values.items():
        *parents, last = path.split("__")
        node = config
        for name in parents:
            node = getattr(node, name)
        setattr(node, last, value)


def good(**values: object) -> PPOConfig:
    """A configuration that passes, with `values` put before deriving."""
    config = PPOConfig()
    put(config, data__train_files="train.parquet", data__val_files="val.parquet", actor_rollout_ref__model__path="model")
    put(config, **({"trainer__device": "cpu"} | values))
    derive(config)
    return config


def test_everything_that_can_be_derived_is() -> None:
    config = good()
    by_key = {leaf.key for leaf in leaves(PPOConfig) if leaf.default is None}
    open_on_purpose = {
        "data.val_batch_size", "data.apply_chat_template_kwargs", "trainer.total_training_steps", "trainer.resume_from_path",
        "trainer.max_actor_ckpt_to_keep", "trainer.keep_best", "custom_reward_function.path",
        "actor_rollout_ref.model.lora_adapter_path", "critic.model.lora_adapter_path",
        "actor_rollout_ref.model.path", "actor_rollout_ref.actor.optim.total_training_steps", "critic.optim.total_training_steps",
        "actor_rollout_ref.rollout.weights_folder", "actor_rollout_ref.rollout.agent.default_agent_loop", "trainer.replay_from",
        "trainer.pipeline", "env.name", "env.num_envs", "env.srpo.path", "actor_rollout_ref.actor.target_kl",
        "actor_rollout_ref.rollout.remote.api_key_file", "actor_rollout_ref.rollout.remote.weights_folder",
        "actor_rollout_ref.rollout.remote.admin_key_file",
        "actor_rollout_ref.rollout.trajectories_folder", "actor_rollout_ref.rollout.quantization",
        "actor_rollout_ref.rollout.min_replicas", "actor_rollout_ref.rollout.max_replicas",
        "actor_rollout_ref.rollout.max_num_seqs", "actor_rollout_ref.rollout.max_num_batched_tokens",
        *(f"actor_rollout_ref.rollout.multi_turn.{name}" for name in
          ("max_assistant_turns", "max_user_turns", "tool_config_path")),
        "actor_rollout_ref.rollout.kv_cache_gb", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high",
        "critic.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "reward_model.micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.model.path", "algorithm.group_filter",
        "reward_model.model.path", "reward_model.model.input_tokenizer", "reward_model.max_length",
        "reward_model.judge.model.path", "reward_model.judge.prompt_template",
        "algorithm.rollout_correction.rollout_is", "algorithm.rollout_correction.rollout_rs",
        "algorithm.rollout_correction.mismatch_warn", "algorithm.rollout_correction.mismatch_stop",
        "algorithm.rollout_correction.rollout_rs_threshold", "algorithm.rollout_correction.m2po_threshold",
        *(
            f"{role}.megatron.{name}"
            for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model")
            for name in ("virtual_pipeline_model_parallel_size", "sequence_parallel", "model_dtype")
        ),
        *(
            f"{role}.fsdp_config.use_torch_compile"
            for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic", "reward_model.model")
        ),
    }  # fmt: skip

    def value(key: str) -> object:
        node: object = config
        for name in key.split("."):
            node = getattr(node, name)
        return node

    assert {key for key in by_key if value(key) is None} <= open_on_purpose
    assert config.actor_rollout_ref.rollout.max_model_len == 1024
    assert config.trainer.n_gpus_per_node == 1
    assert config.trainer.default_local_dir == "checkpoints/rlhub/run"


def test_parts_follow_the_actor_without_sharing_its_objects() -> None:
    config = good(
        actor_rollout_ref__actor__ppo_mini_batch_size=64,
        actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu=3,
        actor_rollout_ref__actor__use_dynamic_bsz=True,
        actor_rollout_ref__rollout__log_prob_use_dynamic_bsz=False,
    )
    critic, parts = config.critic, config.actor_rollout_ref
    assert (critic.ppo_mini_batch_size, critic.ppo_micro_batch_size_per_gpu, critic.use_dynamic_bsz) == (64, 3, True)
    assert parts.rollout.log_prob_use_dynamic_bsz is False and parts.ref.log_prob_use_dynamic_bsz is True
    assert critic.fsdp_config == parts.actor.fsdp_config and critic.fsdp_config is not parts.actor.fsdp_config
    assert critic.model == parts.model and critic.model is not parts.model


def test_replicas_that_follow_the_queue_have_a_known_number_of_places() -> None:
    R = "actor_rollout_ref__rollout__"
    for key in ("min_replicas", "max_replicas"):
        assert good(**{f"{R}{key}": 1}).actor_rollout_ref.rollout.max_num_seqs == 256
        assert good(**{f"{R}{key}": 1, f"{R}max_num_seqs": 9}).actor_rollout_ref.rollout.max_num_seqs == 9
    assert good().actor_rollout_ref.rollout.max_num_seqs is None


def test_device_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derive_rules, "count_gpus", lambda: 4)
    monkeypatch.setattr(derive_rules, "torch_has_cuda", lambda: True)
    config = PPOConfig()
    derive(config)
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == ("cuda", 4)
    monkeypatch.setattr(derive_rules, "torch_has_cuda", lambda: False)
    config = PPOConfig()
    derive(config)
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == ("cpu", 1)


_A, _R = "actor_rollout_ref__actor__", "actor_rollout_ref__rollout__"


def cuts(config: PPOConfig) -> list[tuple[bool | None, int | None, int | None]]:
    """How actor, log-probs, reference, critic and reward model cut their passes: (by tokens, rows, tokens)."""
    actor, critic, scoring = config.actor_rollout_ref.actor, config.critic, config.reward_model
    rollout, ref = config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref
    return [
        *((part.use_dynamic_bsz, part.ppo_micro_batch_size_per_gpu, part.ppo_max_token_len_per_gpu) for part in (actor, critic)),
        *(
            (part.log_prob_use_dynamic_bsz, part.log_prob_micro_batch_size_per_gpu, part.log_prob_max_token_len_per_gpu)
            for part in (rollout, ref)
        ),
        (scoring.use_dynamic_bsz, scoring.micro_batch_size_per_gpu, scoring.forward_max_token_len_per_gpu),
    ]


def test_on_gpus_a_pass_is_no_whole_mini_batch() -> None:
    """256 prompts x 8 samples in one pass would exceed every GPU; passes of many tokens fit, and keep it busy."""
    assert cuts(good(trainer__device="cuda", trainer__n_gpus_per_node=1)) == [(True, None, 16384)] * 5
    assert cuts(good()) == [(False, None, 16384)] * 5  # on CPU memory is not that scarce


def test_what_the_user_says_of_micro_batches_holds_on_gpus() -> None:
    gpu = {"trainer__device": "cuda", "trainer__n_gpus_per_node": 1}
    assert cuts(good(**gpu, **{f"{_A}ppo_micro_batch_size_per_gpu": 4})) == [(False, 4, 16384)] * 5
    assert cuts(good(**gpu, **{f"{_A}use_dynamic_bsz": False})) == [(False, None, 16384)] * 5
    assert cuts(good(**gpu, **{f"{_A}ppo_max_token_len_per_gpu": 5000})) == [(True, None, 5000)] * 5
    own = good(
        **gpu,
        **{f"{_R}log_prob_micro_batch_size_per_gpu": 8},
        actor_rollout_ref__ref__log_prob_micro_batch_size_per_gpu=16,
        critic__ppo_micro_batch_size_per_gpu=2,
    )
    rows = [(False, 2, 16384), (False, 8, 16384), (False, 16, 16384), (False, 8, 16384)]
    assert cuts(own) == [(True, None, 16384), *rows]  # the reward model follows the log-probs
    said = good(**gpu, **{f"{_A}use_dynamic_bsz": True, f"{_R}log_prob_micro_batch_size_per_gpu": 8})
    assert cuts(said)[2] == (True, 8, 16384)  # what was said of the actor holds for those that follow it


def test_a_row_longer_than_the_default_pass_is_a_pass_of_its_own() -> None:
    config = good(trainer__device="cuda", trainer__n_gpus_per_node=1, data__max_response_length=32768)
    assert cuts(config) == [(True, None, 512 + 32768)] * 5 and checks.check(config) == []


@pytest.mark.parametrize(("config", "longest"), [(SFTConfig, 30000), (RMConfig, 2 * 30000), (DPOConfig, 2 * 30000)])
def test_supervised_training_on_gpus_cuts_by_tokens(config: type[SFTConfig | RMConfig | DPOConfig], longest: int) -> None:
    def data(device: str = "cuda", **values: object) -> tuple[bool | None, int | None]:
        built = config()
        put(built, trainer__device=device, trainer__n_gpus_per_node=1, **values)
        derive(built)
        return built.data.use_dynamic_bsz, built.data.max_token_len_per_gpu

    assert data() == (True, 16384) and data("cpu") == (False, 16384)
    assert data(data__micro_batch_size_per_gpu=4) == (False, 16384)
    assert data(data__use_dynamic_bsz=False) == (False, 16384)
    assert data(data__max_token_len_per_gpu=50000) == (True, 50000)
    assert data(data__max_length=30000) == (True, longest)


def test_torchrun_says_how_many_ranks_run_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every rank runs it; else the variable is another program's."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for controller, ranks in (("multi", 4), ("single", 1)):
        config = PPOConfig()
        config.trainer.controller, config.trainer.device = controller, "cpu"  # type: ignore[assignment]
        derive(config)
        assert config.trainer.n_gpus_per_node == ranks


def test_the_critic_does_not_start_from_the_policys_adapter() -> None:
    config = good(actor_rollout_ref__model__lora_rank=4, actor_rollout_ref__model__lora_adapter_path="adapter")
    assert config.critic.model is not None and config.critic.model.lora_adapter_path is None
    assert config.critic.model.lora_rank == config.actor_rollout_ref.model.lora_rank == 4
