"""The command line of the mains, called in this process."""

from __future__ import annotations

import logging
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rlhub.config.cli import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, run
from rlhub.config.compose import example_names
from rlhub.config.schema import leaves, to_dict
from rlhub.config.sections.export import ExportConfig
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.config.sections.serve import ServeConfig
from rlhub.config.sections.sft import SFTConfig
from rlhub.errors import DataError, EngineError
from rlhub.utils.redact import redact

CLASSES = (PPOConfig, SFTConfig, DPOConfig, RMConfig, ServeConfig, ExportConfig)

# Command lines as people bring them from the field's established configuration.
GRPO = """
    data.train_files=gsm8k/train.parquet data.val_files=gsm8k/test.parquet data.train_batch_size=1024 data.max_prompt_length=512
    data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error algorithm.adv_estimator=grpo
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.ppo_mini_batch_size=256
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32 actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.model.enable_gradient_checkpointing=True
    actor_rollout_ref.actor.fsdp_config.param_offload=False actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32 actor_rollout_ref.ref.fsdp_config.param_offload=True
    algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.logger='["console","wandb"]' trainer.project_name=gsm8k
    trainer.experiment_name=grpo trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
    trainer.total_epochs=15
"""
PPO = f"""
    {GRPO} algorithm.adv_estimator=gae critic.optim.lr=1e-5 critic.model.use_remove_padding=True
    critic.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.model.enable_gradient_checkpointing=True
    critic.ppo_micro_batch_size_per_gpu=32 critic.model.fsdp_config.param_offload=False algorithm.use_kl_in_reward=True
    algorithm.kl_ctrl.kl_coef=0.001
"""
ENOUGH = ["data.train_files=a.parquet", "actor_rollout_ref.model.path=m"]


@pytest.fixture(autouse=True)
def quiet_root_logger() -> Iterator[None]:
    """`run` sets logging up where nobody has; leave the process as it was."""
    handlers = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = handlers


def start(*argv: str, **keywords: object) -> tuple[int, list[PPOConfig]]:
    seen: list[PPOConfig] = []
    code = run(PPOConfig, "ppo", lambda config: seen.append(config), description="Train.", argv=list(argv), **keywords)  # type: ignore[arg-type]
    return code, seen


@pytest.mark.parametrize("line", [GRPO, PPO])
def test_established_command_lines_reach_main(line: str) -> None:
    code, (config,) = start(*shlex.split(line))
    assert code == 0
    assert config.actor_rollout_ref.ref.fsdp_config is not None and config.actor_rollout_ref.ref.fsdp_config.param_offload
    assert config.trainer.logger == ["console", "wandb"]
    assert config.critic.model is not None and config.critic.ppo_micro_batch_size_per_gpu == 32
    wanted = "Qwen/Qwen2.5-0.5B-Instruct" if line is PPO else "Qwen/Qwen2.5-3B-Instruct"
    assert config.critic.model.path == wanted


def test_without_data_it_says_what_is_missing_and_where_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = start()
    error = capsys.readouterr().err
    assert code == EXIT_USAGE and not seen
    assert "data.train_files is not set" in error and "bash scripts/quickstart.sh" in error and "model.path" in error
    assert "Traceback" not in error


def test_help_lists_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = start("--help")
    text = capsys.readouterr().out
    assert code == 0 and not seen
    for leaf in leaves(PPOConfig):
        section, _, name = leaf.key.rpartition(".")
        assert f"\n{section}.\n" in text and f"\n  {name} = " in text
    assert "train_batch_size = 1024" in text and "scripts/quickstart.sh" in text


def test_the_example_of_help_has_settings_of_its_main(capsys: pytest.CaptureFixture[str]) -> None:
    run(ExportConfig, "export", lambda config: None, description="Export.", argv=["--help"])
    assert "data.train_files" not in capsys.readouterr().out
    start("--help")
    assert "for example\n  data.train_files=train.parquet" in capsys.readouterr().out


def test_help_and_a_wrong_name_list_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    start("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--config-name=NAME, of examples/0.5b_1gpu, " in text and all(name in text for name in example_names())
    run(SFTConfig, "sft", lambda config: None, description="Supervised.", argv=["--help"])
    assert "examples/" not in capsys.readouterr().out, "they are configurations of a policy"
    assert start("--config-name=examples/7b_8gpus", *ENOUGH) == (EXIT_USAGE, [])
    error = capsys.readouterr().err
    assert all(name in error for name in ("no examples/7b_8gpus.yaml", *example_names()))


def test_help_into_a_pipe_that_closes_is_no_error() -> None:
    code = "from rlhub.config.cli import run; from rlhub.config.sections.ppo import PPOConfig; import sys\n"
    code += "sys.exit(run(PPOConfig, 'ppo', lambda config: None, description='', argv=['--help']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_cfg_job_prints_the_resolved_configuration_even_if_incomplete(capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = start("--cfg", "job", "trainer.experiment_name=x", "+trainer.ray_init.runtime_env.env_vars.WANDB_API_KEY=hush")
    text = capsys.readouterr().out
    assert code == 0 and not seen
    tree = yaml.safe_load(text)
    assert tree["trainer"]["default_local_dir"] == "checkpoints/rlhub/x"
    assert tree["critic"]["ppo_mini_batch_size"] == 256  # derived
    assert "hush" not in text
    assert tree.keys() == to_dict(PPOConfig()).keys()


def test_no_value_of_an_environment_and_no_secret_is_ever_shown(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """In the configuration, in problems with it, and in warnings."""
    env = "trainer.ray_init.runtime_env.env_vars"
    secrets = [f"+{env}.OPENAI_KEY=hush1", f"+{env}.MY_PAT=hush2", f"+{env}.PLAIN=hush3", "+trainer.ray_init.redis_pat=hush4"]
    start("--cfg", "job", *secrets)
    with caplog.at_level(logging.WARNING):
        start(*ENOUGH, "trainer.backend=local", "trainer.n_gpus_per_node=1", *secrets)
    start(*ENOUGH, *secrets, f"+{env}.BROKEN=hush5=hush6,[", f"+{env}.LIST=hush7,hush8")
    start(*ENOUGH, "trainer.plugins={API_KEY:hush9}", "trainer.no_such_token=hush10")
    shown = capsys.readouterr()
    assert "OPENAI_KEY: <redacted>" in shown.out and "trainer.ray_init=" in caplog.text and "cannot read" in shown.err
    assert "hush" not in shown.out + shown.err + caplog.text


def test_no_setting_of_ours_is_taken_for_a_secret() -> None:
    names = {leaf.key.rpartition(".")[2]: "shown" for cls in CLASSES for leaf in leaves(cls)}
    assert redact(names) == names


def test_a_folder_of_another_framework_that_is_not_here_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    for option in (("--config-path=config",), ("--config-path", "/nowhere/verl/trainer/config"), ()):
        for name in ("ppo_trainer", "ppo_trainer.yaml"):
            code, (config,) = start(*option, f"--config-name={name}", *ENOUGH)
            assert code == 0 and config.actor_rollout_ref.actor.strategy == "fsdp2"
    for name in ("ppo_megatron_trainer", "ppo_megatron_trainer.yaml"):
        code, (config,) = start("-cp", "./config", "-cn", name, *ENOUGH)
        assert code == 0 and (config.actor_rollout_ref.actor.strategy, config.critic.strategy) == ("megatron", "megatron")


def test_a_file_of_ones_own_goes_before_ours_and_one_that_is_nowhere_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ppo_trainer.yaml").write_text("trainer: {seed: 7}\n")
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_megatron_trainer, _self_]\ntrainer: {seed: 8}\n")
    for name, seed, strategy in (("ppo_trainer", 7, "fsdp2"), ("mine", 8, "megatron"), ("ppo_megatron_trainer", 1, "megatron")):
        code, (config,) = start(f"--config-path={tmp_path}", f"--config-name={name}", *ENOUGH)
        assert (code, config.trainer.seed, config.actor_rollout_ref.actor.strategy) == (0, seed, strategy)
    code, seen = start("--config-path=config", "--config-name=theirs", *ENOUGH)
    error = capsys.readouterr().err
    assert code == EXIT_USAGE and not seen and "config: no such folder" in error and "is not set" not in error


def test_check_says_all_that_is_wrong_or_ok_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = start("--check", *ENOUGH)
    assert (code, seen) == (0, []) and capsys.readouterr().out.startswith("ok")
    code, seen = start("--check", ENOUGH[0], "trainer.save_freq=0")
    error = capsys.readouterr().err
    assert (code, seen) == (EXIT_USAGE, []) and "2 problems" in error and "trainer.save_freq=0" in error
    code, seen = start("--check", *ENOUGH, ready=lambda config: ["wandb: no login"])
    assert (code, seen) == (EXIT_USAGE, []) and capsys.readouterr().err == "error: wandb: no login\n"


def test_problems_of_loading_checks_and_preflight_come_together(capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = start(
        "data.train_fils=x", "trainer.save_freq=0", *ENOUGH[1:], preflight=lambda config, set_keys: [f"seen {sorted(set_keys)}"]
    )
    error = capsys.readouterr().err
    assert code == EXIT_USAGE and not seen
    assert "did you mean data.train_files?" in error and "trainer.save_freq=0" in error
    assert "seen ['actor_rollout_ref.model.path', 'trainer.save_freq']" in error
    assert "data.train_files is not set" not in error  # it would only repeat the misspelt key


def test_a_setting_without_effect_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        code, seen = start(*ENOUGH, "actor_rollout_ref.model.lora_alpha=32")
    assert code == 0 and seen
    assert "actor_rollout_ref.model.lora_alpha=32.0 has no effect" in caplog.text


def test_a_mapping_without_effect_is_shown_as_it_was_set_and_not_as_null(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        code, _ = start(*ENOUGH, "trainer.backend=local", "trainer.ray_init.num_cpus=2", "+trainer.ray_init.api_key=hush")
    assert code == 0
    assert "trainer.ray_init={num_cpus:2,api_key:<redacted>} has no effect: trainer.backend=local starts no Ray" in caplog.text


def test_a_main_may_require_other_settings(capsys: pytest.CaptureFixture[str]) -> None:
    code, seen = start("data.val_files=v.parquet", required=("data.val_files",))
    assert code == 0 and seen
    code, seen = start(*ENOUGH, required=("data.val_files",))
    assert code == EXIT_USAGE and "data.val_files is not set" in capsys.readouterr().err


def test_bad_options_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert start("--nonsense")[0] == EXIT_USAGE
    assert start("--cfg", "nothing")[0] == EXIT_USAGE
    capsys.readouterr()


def test_options_and_settings_may_be_mixed() -> None:
    code, (config,) = start(ENOUGH[0], "--config-name", "ppo", ENOUGH[1])
    assert code == 0 and config.actor_rollout_ref.model.path == "m"


def test_mains_result_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    def bad_data(config: PPOConfig) -> int:
        raise DataError("a.parquet row 3: no prompt")

    def broken(config: PPOConfig) -> int:
        raise EngineError("a bug, not the user's fault")

    assert run(PPOConfig, "ppo", lambda config: 130, description="", argv=ENOUGH) == 130
    assert run(PPOConfig, "ppo", bad_data, description="", argv=ENOUGH) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("error: a.parquet row 3")
    assert run(PPOConfig, "ppo", broken, description="", argv=ENOUGH) == EXIT_FAILURE
    assert capsys.readouterr().err.startswith("error: a bug")


def test_ctrl_c_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(config: PPOConfig) -> int:
        raise KeyboardInterrupt

    assert run(PPOConfig, "ppo", interrupted, description="", argv=ENOUGH) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"
