"""Command lines as they are written for the established configuration, through the program that judges many of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.checks import command_lines
from scripts.checks.command_lines import Outcome, make_places, outcome, replaced

COMMON = """
    data.train_files=gsm8k/train.parquet data.val_files=gsm8k/test.parquet data.train_batch_size=256 data.max_prompt_length=512
    data.max_response_length=1024 data.filter_overlong_prompts=True data.truncation=error data.return_raw_chat=True
    actor_rollout_ref.model.path=some/model actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.rollout.tensor_model_parallel_size=2
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 algorithm.adv_estimator=grpo
    trainer.logger=["console","wandb"] trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5
"""
LINES = {
    "fsdp, several speed and memory switches": """
        actor_rollout_ref.actor.use_torch_compile=False actor_rollout_ref.ref.use_torch_compile=True
        actor_rollout_ref.actor.fsdp_config.forward_prefetch=True actor_rollout_ref.model.use_liger=True
        actor_rollout_ref.actor.entropy_from_logits_with_chunking=True actor_rollout_ref.nccl_timeout=7200
        actor_rollout_ref.rollout.load_format=auto actor_rollout_ref.rollout.multi_stage_wake_up=True
        actor_rollout_ref.actor.checkpoint.save_contents=['model','hf_model'] trainer.use_legacy_worker_impl=disable""",
    "adapters": """
        actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=32 actor_rollout_ref.rollout.layered_summon=True
        actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.model.target_modules=all-linear""",
    "dynamic sampling with a penalty for length": """
        data.gen_batch_size=768 algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc
        algorithm.filter_groups.max_num_gen_batches=10 reward_model.reward_manager=dapo
        +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True +reward_model.reward_kwargs.overlong_buffer_cfg.len=512
        +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 +reward_model.reward_kwargs.max_resp_len=1024
        +reward_model.reward_kwargs.overlong_buffer_cfg.log=False actor_rollout_ref.actor.clip_ratio_high=0.28
        actor_rollout_ref.actor.policy_loss.loss_mode=vanilla""",
    "megatron": """
        --config-path=config --config-name=ppo_megatron_trainer.yaml
        actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
        actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2
        actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2
        actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.model.use_fused_kernels=True
        +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
        +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True""",
    "experts": """
        --config-path=./config --config-name=ppo_megatron_trainer actor_rollout_ref.actor.megatron.expert_model_parallel_size=4
        actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 actor_rollout_ref.actor.megatron.use_mbridge=True
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=1""",
    "a reward model behind an engine": """
        algorithm.adv_estimator=gae critic.model.path=some/model critic.optim.lr=1e-5 critic.ppo_micro_batch_size_per_gpu=8
        reward_model.enable=True reward_model.model.path=some/reward-model reward_model.use_reward_loop=True
        reward_model.rollout.name=vllm reward_model.rollout.gpu_memory_utilization=0.8 reward_model.num_workers=4""",
    "profiling": """
        global_profiler.tool=nsys global_profiler.steps=[1,2] actor_rollout_ref.actor.profiler.enable=True
        actor_rollout_ref.actor.profiler.ranks=[0,1] ray_kwargs.ray_init.num_cpus=16""",
}
REFUSED = {
    "another engine": ("actor_rollout_ref.rollout.name=sglang", ("rollout.name=vllm", "remote.server=sglang")),
    "sequence parallelism": (
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        ("strategy=megatron", "actor_rollout_ref.actor.megatron.context_model_parallel_size"),
    ),
    "sizes over all ranks": ("actor_rollout_ref.actor.ppo_micro_batch_size=64", ("_per_gpu",)),
    "another accelerator": ("trainer.device=npu", ("cuda and cpu",)),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_places(tmp_path_factory.mktemp("places"))


@pytest.fixture(autouse=True)
def quiet_root_logger() -> Iterator[None]:
    """The mains set logging up where nobody has; leave the process as it was."""
    handlers = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = handlers


def judged(text: str, places: dict[str, str]) -> Outcome:
    """The line's own settings win over the common ones."""
    return outcome("line", "ppo", replaced([*COMMON.split(), *text.split()], places))


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_command_line_of_the_established_configuration_passes_all_checks(line: str, places: dict[str, str]) -> None:
    found = judged(line, places)
    assert found.problems == []
    assert all(text.count("has no effect: ") <= 1 for text in found.warnings)


@pytest.mark.parametrize(("setting", "instead"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_the_only_problem_and_says_what_to_use(
    setting: str, instead: tuple[str, ...], places: dict[str, str]
) -> None:
    (problem,) = judged(setting, places).problems
    assert setting.partition("=")[0] in problem and all(text in problem for text in instead)


def test_the_program_counts_what_passes_and_fails_where_more_are_refused_than_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [COMMON.split(), [*COMMON.split(), "trainer.no_such_setting=1"]]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps({"name": f"line {i}", "arguments": line}) + "\n" for i, line in enumerate(lines)))
    assert command_lines.main([str(file), "--refused", "1"]) == 0
    assert "1 of 2 pass all checks" in capsys.readouterr().out
    assert command_lines.main([str(file), "--messages"]) == 1
    assert "trainer.no_such_setting: no such setting" in capsys.readouterr().out
