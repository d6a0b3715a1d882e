"""Derived settings, rules between settings with their arithmetic, and settings without effect."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rlhub.config.rules import checks, effects, parallel
from rlhub.config.rules.parallel import derive
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


def test_the_default_passes() -> None:
    assert checks.check(good()) == []


def test_everything_that_can_be_derived_is() -> None:
    config = good()
    by_key = {leaf.key for leaf in leaves(PPOConfig) if leaf.default is None}
    open_on_purpose = {
        "data.val_batch_size", "data.apply_chat_template_kwargs", "trainer.total_training_steps", "trainer.resume_from_path",
        "trainer.max_actor_ckpt_to_keep", "trainer.keep_best", "custom_reward_function.path",
        "actor_rollout_ref.model.path", "actor_rollout_ref.actor.optim.total_training_steps", "critic.optim.total_training_steps",
        "actor_rollout_ref.rollout.weights_folder", "actor_rollout_ref.rollout.agent.default_agent_loop", "trainer.replay_from",
        "actor_rollout_ref.rollout.remote.api_key_file", "actor_rollout_ref.rollout.remote.weights_folder",
        "actor_rollout_ref.rollout.remote.admin_key_file",
        "actor_rollout_ref.rollout.trajectories_folder",
        *(f"actor_rollout_ref.rollout.multi_turn.{name}" for name in
          ("max_assistant_turns", "max_user_turns", "tool_config_path")),
        "actor_rollout_ref.rollout.kv_cache_gb", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.clip_ratio_low", "actor_rollout_ref.actor.clip_ratio_high",
        "critic.ppo_micro_batch_size_per_gpu", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "reward_model.micro_batch_size_per_gpu",
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


def test_device_follows_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "count_gpus", lambda: 4)
    monkeypatch.setattr(parallel, "torch_has_cuda", lambda: True)
    config = PPOConfig()
    derive(config)
    assert (config.trainer.device, config.trainer.n_gpus_per_node) == ("cuda", 4)
    monkeypatch.setattr(parallel, "torch_has_cuda", lambda: False)
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


REWARD_MODEL = {"reward_model__enable": True, "reward_model__model__path": "some/model"}
JUDGE = {"reward_model__judge__model__path": "some/judge"}


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"data__train_batch_size": 64}, ("64 is less than", "ppo_mini_batch_size=256", "set actor_rollout_ref.actor")),
        ({"data__train_batch_size": 600}, ("600 = 2 x 256 + 88", "200 or 300")),
        ({"critic__ppo_mini_batch_size": 300}, ("critic.ppo_mini_batch_size=300", "1024 = 3 x 300 + 124")),
        (
            {"data__train_batch_size": 2, f"{_A}ppo_mini_batch_size": 2, "trainer__n_gpus_per_node": 4},
            ("2 prompts x n=1 = 2 samples", "1 x trainer.n_gpus_per_node=4 = 4 ranks"),
        ),
        ({f"{_R}max_model_len": 1000}, ("1000 is less than", "512 + data.max_response_length=512 = 1024")),
        ({f"{_R}enable_chunked_prefill": False, f"{_R}max_num_batched_tokens": 512}, ("512 is less than max_model_len=1024",)),
        ({f"{_A}use_dynamic_bsz": True, f"{_A}ppo_max_token_len_per_gpu": 1023}, ("=1023 tokens cannot hold one row", "= 1024")),
        ({"critic__use_dynamic_bsz": True, "critic__ppo_max_token_len_per_gpu": 9}, ("critic.ppo_max_token_len_per_gpu=9",)),
        ({f"{_R}tensor_model_parallel_size": 2, "trainer__n_gpus_per_node": 3}, ("3 = 1 x 2 + 1",)),
        ({f"{_A}fsdp_config.fsdp_size".replace(".", "__"): 2, "trainer__n_gpus_per_node": 3}, ("fsdp_size=2", "3 ranks")),
        ({"trainer__backend": "local", "trainer__n_gpus_per_node": 2}, ("backend=local", "2 ranks")),
        ({"algorithm__filter_groups__enable": True}, ("filter_groups.enable=true", "rollout.n=1", "2 or more")),
        (
            {
                "algorithm__filter_groups__enable": True,
                f"{_R}n": 2,
                "algorithm__filter_groups__metric": "seq_final_reward",
                "algorithm__use_kl_in_reward": True,
            },
            ("metric=seq_final_reward", "use seq_reward"),
        ),
        ({"trainer__resume_mode": "resume_path"}, ("trainer.resume_from_path",)),
        ({"trainer__test_freq": 5, "data__val_files": None}, ("data.val_files is not set",)),
        ({"trainer__keep_best": "val/pass@1", "data__val_files": None}, ("needs validation",)),
        ({"trainer__save_freq": 0}, ("trainer.save_freq=0",)),
        ({"critic__optim__betas": [0.9]}, ("critic.optim.betas",)),
        ({"reward_model__enable": True}, ("reward_model.enable=true", "reward_model.model.path is not set")),
        ({"reward_model__function_weight": 0}, ("function_weight=0 leaves nothing to score with",)),
        ({"reward_model__function_weight": float("nan")}, ("reward_model.function_weight=nan",)),
        (REWARD_MODEL | {"reward_model__weight": float("inf")}, ("reward_model.weight=inf",)),
        (REWARD_MODEL | {"reward_model__model__fsdp_config__fsdp_size": 2}, ("reward_model.model.fsdp_config.fsdp_size=2",)),
        (
            REWARD_MODEL | {"reward_model__use_dynamic_bsz": True, "reward_model__forward_max_token_len_per_gpu": 9},
            ("reward_model.forward_max_token_len_per_gpu=9",),
        ),
        (JUDGE | {"reward_model__judge__min_score": 10.0}, ("min_score=10.0 is not less than",)),
        (JUDGE | {"reward_model__judge__n": 2}, ("judge.n=2", "temperature=0")),
        (JUDGE | {"reward_model__judge__tensor_model_parallel_size": 2}, ("1 = 0 x 2 + 1",)),
    ],
)
def test_each_rule_names_what_breaks_it(values: dict[str, object], parts: tuple[str, ...]) -> None:
    (problem,) = checks.check(good(**values))
    assert all(part in problem for part in parts), problem


def test_problems_come_together() -> None:
    assert len(checks.check(good(trainer__test_freq=0, data__train_batch_size=64, trainer__save_freq=0))) == 3


def test_required_settings() -> None:
    keys = checks.REQUIRED[PPOConfig]
    assert checks.check_required(good(), keys) == []
    first, second = checks.check_required(good(data__train_files=[], actor_rollout_ref__model__path=None), keys)
    assert first.startswith("data.train_files is not set") and "bash scripts/quickstart.sh" in first
    assert second.startswith("actor_rollout_ref.model.path is not set")


def test_group_estimators_need_groups() -> None:
    (problem,) = checks.check_requirements(good(), frozenset({"groups"}))
    assert "actor_rollout_ref.rollout.n=1" in problem and "2 or more" in problem
    assert checks.check_requirements(good(actor_rollout_ref__rollout__n=2), frozenset({"groups"})) == []
    assert checks.check_requirements(good(), frozenset({"values"})) == []


def test_uneven_sizes_are_stated() -> None:
    texts = checks.notes(good(trainer__n_gpus_per_node=3))
    assert "1024 prompts x n=1 = 1024 samples = 3 ranks x 341 + 1" in texts[0] and len(texts) == 2
    assert checks.notes(good(trainer__n_gpus_per_node=4)) == []


def test_sft_rules() -> None:
    config = SFTConfig()
    put(config, data__use_dynamic_bsz=True, data__max_token_len_per_gpu=8, trainer__device="cpu")
    derive(config)
    texts = checks.check(config)
    assert [text.split()[0] for text in texts] == ["data.max_token_len_per_gpu=8"]
    assert len(checks.check_required(config, checks.REQUIRED[SFTConfig])) == 2


@pytest.mark.parametrize(
    ("key", "value", "cure"),
    [
        ("actor_rollout_ref.actor.kl_loss_coef", 0.1, {f"{_A}use_kl_loss": True}),
        ("algorithm.kl_ctrl.kl_coef", 0.1, {"algorithm__use_kl_in_reward": True}),
        ("algorithm.filter_groups.metric", "acc", {"algorithm__filter_groups__enable": True}),
        ("actor_rollout_ref.model.lora_alpha", 32.0, {"actor_rollout_ref__model__lora_rank": 8}),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu", 9000, {f"{_A}use_dynamic_bsz": True}),
        ("actor_rollout_ref.actor.loss_scale_factor", 7.0, {f"{_A}loss_agg_mode": "seq-mean-token-sum-norm"}),
        ("actor_rollout_ref.rollout.val_kwargs.temperature", 1.0, {f"{_R}val_kwargs__do_sample": True}),
        ("actor_rollout_ref.actor.optim.min_lr_ratio", 0.1, {f"{_A}optim__lr_scheduler_type": "cosine"}),
        ("actor_rollout_ref.rollout.gpu_memory_utilization", 0.6, {"trainer__device": "cuda"}),
        ("custom_reward_function.name", "score", {"custom_reward_function__path": "x.py"}),
        ("trainer.resume_from_path", "x", {"trainer__resume_mode": "resume_path"}),
        ("reward_model.weight", 2.0, REWARD_MODEL),
        ("reward_model.model.path", "some/model", {"reward_model__enable": True}),
        ("reward_model.model.fsdp_config.fsdp_size", 1, REWARD_MODEL),
        ("reward_model.forward_max_token_len_per_gpu", 9000, REWARD_MODEL | {"reward_model__use_dynamic_bsz": True}),
        ("reward_model.max_length", 9, REWARD_MODEL | {"reward_model__model__input_tokenizer": "model"}),
        ("reward_model.judge.weight", 2.0, JUDGE),
    ],
)
def test_a_setting_nobody_reads_is_named_and_only_then(key: str, value: object, cure: dict[str, object]) -> None:
    setting = {key.replace(".", "__"): value}
    (warning,) = effects.without_effect(good(**setting), {key})
    assert warning.startswith(f"{key}={value} has no effect: ")
    assert effects.without_effect(good(**setting, **cure), {key}) == []
    assert effects.without_effect(good(**setting), set()) == []  # the user did not say it


@pytest.mark.parametrize(
    ("key", "value"),
    [("reward_model.timeout_s", 9.0), ("reward_model.reward_kwargs", {"a": 1}), ("custom_reward_function.path", "x.py")],
)
def test_without_a_function_its_settings_have_no_effect(key: str, value: object) -> None:
    setting = {key.replace(".", "__"): value}
    (warning,) = effects.without_effect(good(**REWARD_MODEL, **setting, reward_model__function_weight=0.0), {key})
    assert warning.endswith("has no effect: reward_model.function_weight is 0")
    assert effects.without_effect(good(**REWARD_MODEL, **setting), {key}) == []


def test_a_default_said_aloud_is_no_warning() -> None:
    assert effects.without_effect(good(), {"trainer.critic_warmup", "actor_rollout_ref.actor.kl_loss_coef"}) == []
