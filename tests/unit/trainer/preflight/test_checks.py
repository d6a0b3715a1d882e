"""What is found before any process starts: each fault alone, named with its key; a sound configuration passes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhub.config.rules.derive import derive
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.trainer.preflight import checks as preflight

MODEL = {
    "model_type": "qwen2",
    "vocab_size": 32,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
SEVERAL = ("data.prompt_key", "actor_rollout_ref.rollout.tensor_model_parallel_size")
"""Settings whose wrong value is wrong in more than one way."""
REWARD_KL_SET = frozenset({"algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.whiten_rewards"})
ROW = {"prompt": "1+1=", "data_source": "exact", "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {}}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data, model and reward files under relative names; no cluster to join."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(MODEL))
    Path("rows.jsonl").write_text(json.dumps(ROW) + "\n")
    Path("sft.jsonl").write_text(json.dumps({"prompt": "1+1=", "response": "2"}) + "\n")
    Path("chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x"}]}) + "\n")
    Path("empty.jsonl").write_text("")
    Path("score.py").write_text("def compute_score(*row): return 1.0\n")


def sound() -> PPOConfig:
    config = PPOConfig()
    config.data.train_files, config.data.val_files = "rows.jsonl", ["rows.jsonl"]
    config.actor_rollout_ref.model.path = "model"
    config.actor_rollout_ref.rollout.name = "hf"
    config.trainer.device = "cpu"
    return config


def problems(change: Callable[[PPOConfig], object]) -> list[str]:
    config = sound()
    change(config)
    derive(config)
    return preflight.check(config)


def put(path: str, value: object) -> Callable[[PPOConfig], object]:
    """A change that sets one dotted field."""

    def change(config: PPOConfig) -> None:
        node: object = config
        *parents, last = path.split(".")
        for name in parents:
            node = getattr(node, name)
        setattr(node, last, value)

    return change


def test_a_sound_configuration_passes() -> None:
    assert problems(lambda config: None) == []
    assert problems(put("custom_reward_function.path", "score.py")) == []
    assert problems(put("actor_rollout_ref.model.path", "Qwen/Qwen2.5-3B-Instruct")) == []


@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("algorithm.adv_estimator", "gea", ("algorithm.adv_estimator: no advantage estimator 'gea'; did you mean 'gae'?",)),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "vanila", ("policy_loss.loss_mode: ", "'vanilla'")),
        ("algorithm.kl_penalty", "k9", ("algorithm.kl_penalty: no KL estimator",)),
        ("actor_rollout_ref.actor.kl_loss_type", "low_var", ("kl_loss_type: ",)),
        ("actor_rollout_ref.rollout.name", "vlm", ("actor_rollout_ref.rollout.name: ", "'vllm'")),
        ("reward_model.reward_manager", "naiv", ("reward_model.reward_manager: ", "'naive'")),
        ("trainer.logger", ["console", "wandbb"], ("trainer.logger: no tracker 'wandbb'; did you mean 'wandb'?",)),
        ("algorithm.adv_kwargs", {"lamb": 0.9}, ("algorithm.adv_kwargs.lamb: no such knob", "'lam'")),
        (
            "actor_rollout_ref.actor.policy_loss.kwargs",
            {"clip_ratio_c": 0.5},
            ("policy_loss.kwargs: clip_ratio_c must be above 1",),
        ),
        ("data.train_files", "nowhere.parquet", ("data.train_files", "nowhere.parquet")),
        ("data.val_files", ["rows.jsonl", "empty.jsonl"], ("data.val_files", "empty.jsonl")),
        ("data.prompt_key", "promt", ("promt",)),
        ("custom_reward_function.path", "nowhere.py", ("custom_reward_function.path=nowhere.py: no such file",)),
        ("actor_rollout_ref.model.path", "./nowhere", ("actor_rollout_ref.model.path=./nowhere: no such folder",)),
        ("actor_rollout_ref.model.path", "/", ("config.json",)),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", 4, ("does not divide the model's 6 heads: 6 = 1 x 4 + 2",)),
        ("data.max_response_length", 513, ("512 + data.max_response_length=513 = 1025 tokens", "1024 positions")),
        ("trainer.plugins", ["no_such_plugin_module"], ("trainer.plugins: importing 'no_such_plugin_module' failed",)),
        ("trainer.default_local_dir", "rows.jsonl/run", ("trainer.default_local_dir",)),
        ("trainer.default_local_dir", "", ("trainer.default_local_dir is empty", "name a folder")),
        ("trainer.default_local_dir", ".", ("trainer.default_local_dir=.:", "holds no run", "an empty or a new folder")),
    ],
)
def test_each_fault_is_named(field: str, value: object, parts: tuple[str, ...]) -> None:
    found = problems(put(field, value))
    assert found and all(any(part in problem for problem in found) for part in parts), found
    assert len(found) == 1 or field in SEVERAL, found


def test_group_estimators_need_groups() -> None:
    (problem,) = problems(put("algorithm.adv_estimator", "grpo"))
    assert "actor_rollout_ref.rollout.n=1" in problem


def test_the_custom_function_must_be_in_its_file() -> None:
    def change(config: PPOConfig) -> None:
        config.custom_reward_function.path, config.custom_reward_function.name = "score.py", "score"

    (problem,) = problems(change)
    assert "custom_reward_function.name=score: not defined in score.py, which has: compute_score" in problem
    Path("score.py").write_text("def broken(:\n")
    (problem,) = problems(change)
    assert "not a Python file" in problem
    for text in ("from math import sqrt as score", "score = print", "try:\n    import x\nexcept ImportError:\n    pass"):
        Path("score.py").write_text(text)
        assert problems(change) == []


def test_the_reward_file_is_read_and_not_run() -> None:
    Path("score.py").write_text("open('ran', 'w')\ndef compute_score(*row): return 1.0\n")
    assert problems(put("custom_reward_function.path", "score.py")) == []
    assert not Path("ran").exists()


def test_plugins_make_their_names_known(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("preflight_plugin_under_test.py").write_text(
        "from rlhub.tracking.recorder import TRACKERS\nTRACKERS.register('preflight_tracker_under_test')(object)\n"
    )
    monkeypatch.syspath_prepend(".")
    assert len(problems(put("trainer.logger", ["preflight_tracker_under_test"]))) == 1

    def change(config: PPOConfig) -> None:
        config.trainer.plugins, config.trainer.logger = ["preflight_plugin_under_test"], ["preflight_tracker_under_test"]

    assert problems(change) == []


def test_a_hub_model_offline_must_be_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (problem,) = problems(put("actor_rollout_ref.model.path", "Some/Model"))
    assert "not in the hub's cache" in problem
    (tmp_path / "hub" / "models--Some--Model" / "snapshots").mkdir(parents=True)
    assert problems(put("actor_rollout_ref.model.path", "Some/Model")) == []


def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def change(config: PPOConfig) -> None:
        config.trainer.device, config.trainer.n_gpus_per_node = "cuda", 4

    monkeypatch.setattr(preflight, "count_gpus", lambda: 0)
    monkeypatch.setattr(preflight, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(preflight, "driver_problem", lambda: None)
    assert "no GPU found" in problems(change)[0]
    monkeypatch.setattr(preflight, "count_gpus", lambda: 2)
    assert problems(change) == ["trainer.n_gpus_per_node=4, but this machine has 2 GPUs"]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert problems(change) == []  # the cluster knows its own GPUs
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(preflight, "count_gpus", lambda: 4)
    assert problems(change) == []
    monkeypatch.setattr(preflight, "driver_problem", lambda: "the NVIDIA driver 535.1 is too old")
    assert problems(change) == ["trainer.device=cuda: the NVIDIA driver 535.1 is too old; trainer.device=cpu runs without"]
    monkeypatch.setattr(preflight, "torch_has_cuda", lambda: False)
    assert "CPU build" in problems(change)[0]


@pytest.mark.parametrize(("kind", "warned"), [("low_var_kl", True), ("kl", True), ("mse", False), ("low_var_kl+", False)])
def test_a_kl_loss_whose_gradient_is_not_the_kls_is_a_warning(caplog: pytest.LogCaptureFixture, kind: str, warned: bool) -> None:
    config = sound()
    actor = config.actor_rollout_ref.actor
    actor.use_kl_loss, actor.kl_loss_type = True, kind
    derive(config)
    with caplog.at_level(logging.WARNING):
        assert preflight.check(config) == []
    assert (f"{kind}+ has the same value and the gradient of the KL" in caplog.text) == warned
    caplog.clear()
    actor.use_kl_loss = False
    assert preflight.check(config) == [] and not caplog.text


@pytest.mark.parametrize(
    ("loss", "kind", "warned"), [("dppo_tv", "token", True), ("dppo_tv", None, False), ("gspo", "token", False)]
)
def test_weights_for_a_loss_that_compares_with_the_rollout_policy_are_a_warning(
    caplog: pytest.LogCaptureFixture, loss: str, kind: str | None, warned: bool
) -> None:
    config = sound()
    config.actor_rollout_ref.actor.policy_loss.loss_mode = loss
    config.algorithm.rollout_correction.rollout_is = kind
    derive(config)
    with caplog.at_level(logging.WARNING):
        assert preflight.check(config) == []
    assert ("weights pi_old / mu on top count that twice" in caplog.text) == warned


def test_what_the_algorithm_does_not_read_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = sound()
    config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n = "rloo", 4
    config.algorithm.lam, config.critic.optim.lr, config.actor_rollout_ref.actor.clip_ratio_c = 0.9, 1e-3, 5.0
    keys = frozenset({"algorithm.lam", "critic.optim.lr", "actor_rollout_ref.actor.clip_ratio_c"})
    derive(config)
    with caplog.at_level(logging.WARNING):
        assert preflight.check(config, keys) == []
    assert "algorithm.lam=0.9 has no effect: algorithm.adv_estimator=rloo does not read it" in caplog.text
    assert "critic.optim.lr=0.001 has no effect: algorithm.adv_estimator=rloo has no critic" in caplog.text
    assert "clip_ratio_c" not in caplog.text  # vanilla reads it
    caplog.clear()
    config.algorithm.adv_estimator = "gae"
    assert preflight.check(config, keys) == [] and not caplog.text


def test_a_relative_checkpoint_is_looked_up_in_the_run_folder_too() -> None:
    """As it is when the run resumes."""

    def resume(name: str) -> list[str]:
        def change(config: PPOConfig) -> None:
            config.trainer.default_local_dir, config.trainer.resume_mode = "runs/one", "resume_path"
            config.trainer.resume_from_path = name

        return problems(change)

    Path("runs/one/global_step_3").mkdir(parents=True)
    Path("runs/one/run.lock").touch()
    assert resume("global_step_3") == resume("runs/one/global_step_3") == []
    (problem,) = resume("global_step_4")
    assert "trainer.resume_from_path=global_step_4: no such folder, neither from here nor in" in problem


def test_sft() -> None:
    def found(**data: object) -> list[str]:
        config = SFTConfig()
        config.model.path, config.trainer.device = "model", "cpu"
        for name, value in {"train_files": "sft.jsonl", **data}.items():
            setattr(config.data, name, value)
        derive(config)
        return preflight.check(config)

    assert found() == []
    assert found(train_files="chats.jsonl") == []
    assert any("response" in problem for problem in found(train_files="rows.jsonl"))
    assert "1025 tokens, but model has 1024 positions" in found(max_length=1025)[0]


def test_an_unknown_configuration_is_a_programming_error() -> None:
    with pytest.raises(TypeError):
        preflight.check(object())


def test_an_engine_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name == "vllm" else object())
    (problem,) = problems(lambda config: setattr(config.actor_rollout_ref.rollout, "name", "vllm"))
    assert "rollout.name=vllm: vllm is not installed" in problem
    others = set(problem.partition("do without: ")[2].replace(",", " ").split())
    assert {"fake", "hf"} <= others and "vllm" not in others, "other tests may register engines too"
    assert problems(lambda config: None) == []  # hf needs none


@pytest.mark.parametrize(("estimator", "expected"), [("gdpo", 3), ("grpo", 0)])
def test_a_kl_in_the_reward_without_effect_is_a_warning(estimator: str, expected: int) -> None:
    config = sound()
    config.algorithm.adv_estimator = estimator
    config.algorithm.use_kl_in_reward, config.algorithm.whiten_rewards, config.algorithm.kl_ctrl.kl_coef = True, True, 0.1
    found = preflight.warnings(config, REWARD_KL_SET)
    assert len(found) == expected, found
    if expected:
        assert any("use_kl_in_reward=true has no effect: algorithm.adv_estimator=gdpo" in warning for warning in found)
        assert any("use_kl_loss" in warning for warning in found)
    config.algorithm.use_kl_in_reward = config.algorithm.whiten_rewards = False
    assert preflight.warnings(config, REWARD_KL_SET) == []


@pytest.mark.parametrize(
    ("general", "own", "messages"),
    [
        ("grpo", {"adv_estimator": "rloo"}, []),
        ("gae", {"adv_estimator": "gae", "adv_kwargs": {"lam": 0.9}}, []),
        (
            "grpo",
            {"adv_estimator": "rlo"},
            ["data.sources.exact.adv_estimator: no advantage estimator 'rlo'; did you mean 'rloo'?"],
        ),
        ("grpo", {"adv_kwargs": {"lma": 1}}, ["data.sources.exact.adv_kwargs.lma: no such knob"]),
        ("reinforce_plus_plus", {"adv_estimator": "gae"}, ["gae needs a critic, which learns from the returns of all rows"]),
        ("gae", {"adv_estimator": "grpo"}, ["algorithm.adv_estimator=gae: gae needs a critic"]),
        ("grpo", {"adv_estimator": "remax"}, ["remax needs a greedy response to every prompt"]),
        (
            "grpo",
            {"adv_estimator": "chunk_grpo"},
            ["data.sources.exact.adv_estimator=chunk_grpo needs the episodes of simulators"],
        ),
        (
            "reinforce_plus_plus",
            {"adv_estimator": "on_policy_distillation"},
            ["data.sources.exact.adv_estimator=on_policy_distillation compares the policy with a teacher"],
        ),
    ],
)
def test_estimators_of_sources(general: str, own: dict, messages: list[str]) -> None:
    """What cannot hold for the rows of one source alone is refused, and each problem names the source's key."""
    config = sound()
    config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n, config.data.sources = general, 2, {"exact": own}
    derive(config)
    found = [problem for problem in preflight.check_training(config) if "GPU" not in problem]
    assert len(found) == len(messages), found
    assert all(message in problem for message, problem in zip(messages, found, strict=True)), found


def test_a_setting_that_a_sources_estimator_reads_is_no_warning() -> None:
    config = sound()
    config.algorithm.adv_estimator, config.algorithm.norm_adv_by_std_in_grpo = "rloo", False
    (warning,) = preflight.warnings(config, frozenset({"algorithm.norm_adv_by_std_in_grpo"}))
    assert "has no effect" in warning
    config.data.sources = {"exact": {"adv_estimator": "grpo"}}
    assert preflight.warnings(config, frozenset({"algorithm.norm_adv_by_std_in_grpo"})) == []
