"""The main job as a whole, on a tiny model and real processes: FSDP2 ranks, vLLM, Ray, a run folder, checkpoints."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlhub.tracking.generations import read_generations
from tests.e2e.conftest import Mains, Result, Task
from tests.support.chat_model import CHAT_TEMPLATE, save_chat_model
from tests.support.metrics import rows_of

RAY_TIMEOUT_S = 500.0
"""Of one run with vLLM in two ranks: half a minute when nothing else runs."""

SMALL_CLUSTER = "trainer.ray_init.object_store_memory=300000000"
TWO_RANKS = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", SMALL_CLUSTER)
LARGEST_MISMATCH = 1e-5
VARYING = ("timing_", "perf/", "memory/", "mismatch/")
COUNTED = ("critic/vf_clipfrac", "actor/pg_clipfrac")
"""Shares of tokens beyond a bound: one token at the bound may fall to either side."""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(ord(letter) % 2 for letter in solution_str) / max(len(solution_str), 1)
"""

MODULES_PLUGIN = """
import atexit, json, os, sys

def write():
    with open(os.path.join(os.environ["MODULES_OUT"], f"{os.getpid()}.json"), "w") as stream:
        json.dump(sorted(sys.modules), stream)

atexit.register(write)
"""

STALE_ENGINE_PLUGIN = """
from rlhub.sharding_manager.manager import ShardingManager

publish = ShardingManager.sync

def publish_once(self, version):
    return publish(self, version) if version == 0 else None

ShardingManager.sync = publish_once
"""


@dataclass(slots=True, kw_only=True)
class Setting:
    """A byte-level model with a chat template, `task`'s prompts, and a reward that differs between its samples."""

    task: Task
    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def arguments(self, run_folder: Path, *more: str) -> list[str]:
        return self.task.arguments(
            run_folder,
            f"actor_rollout_ref.model.path={self.model}",
            "actor_rollout_ref.rollout.n=4",
            "data.max_prompt_length=24",
            f"custom_reward_function.path={self.folder / 'reward.py'}",
            "trainer.total_training_steps=2",
            *more,
        )

    @property
    def validation(self) -> str:
        return f"data.val_files={self.task.folder / 'val.parquet'}"


@pytest.fixture(scope="module")
def setting(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("setting")
    save_chat_model(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    (folder / "modules_plugin.py").write_text(MODULES_PLUGIN)
    (folder / "stale_engine_plugin.py").write_text(STALE_ENGINE_PLUGIN)
    return Setting(task=task, folder=folder)


def finished(result: Result) -> Result:
    assert result.code == 0, result.output
    assert "Traceback" not in result.output, result.output
    return result


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; every number in them is finite."""
    rows = rows_of(folder)
    for row in rows:
        wrong = {name: value for name, value in row.items() if not isinstance(value, str) and not math.isfinite(value)}
        assert wrong == {}, (row["step"], wrong)
    return rows


EVERY_STEP = (
    "reward/mean", "response_length/mean", "response_length/max", "response_length/clip_ratio", "mismatch/kl",
    "actor/pg_loss", "actor/entropy", "actor/pg_clipfrac", "actor/ppo_kl", "actor/grad_norm", "actor/lr",
    "critic/score/mean", "critic/rewards/mean", "critic/advantages/mean", "critic/returns/mean",
    "timing_s/step", "timing_s/generate_sequences", "timing_s/update_actor", "timing_s/reward",
    "perf/throughput", "perf/time_per_step", "perf/tflops/actor",
    *(f"perf/driver_{what}" for what in ("bytes_out", "bytes_in", "bytes_prompts", "calls")),
    *(f"timing_per_token_ms/{phase}" for phase in ("gen", "adv", "update_actor")),
)  # fmt: skip
WITH_CRITIC = (
    "critic/values/mean", "critic/vf_loss", "critic/vf_explained_var", "timing_s/update_critic", "perf/tflops/critic",
    *(f"timing_per_token_ms/{phase}" for phase in ("values", "update_critic")),
)  # fmt: skip


def check_run_folder(folder: Path, *, steps: int, ranks: int) -> list[dict[str, Any]]:
    """All that a run leaves behind; returns its metrics."""
    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert 0.0 <= rows[0]["val/pass@1"] <= 1.0 and "actor/pg_loss" not in rows[0]
    for row in rows[1:]:
        assert [name for name in EVERY_STEP if name not in row] == []
        assert not any(name.startswith("perf/mfu/") for name in row), "a CPU has no known peak"
        tokens_per_s = row["perf/total_num_tokens"] / row["timing_s/step"]
        assert row["perf/throughput"] == pytest.approx(tokens_per_s / ranks)
    assert "timing_s/sync_weights" in rows[0] and all("timing_s/sync_weights" in row for row in rows[2:])
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["trainer"]["n_gpus_per_node"] == ranks
    report = (folder / "report.html").read_text()
    assert "<svg" in report and 'src="http' not in report and 'href="http' not in report
    roles = "actor_rollout_ref+critic" if "critic/vf_loss" in rows[1] else "actor_rollout_ref"
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [f"{roles}-rank{r}.log" for r in range(ranks)]
    assert (folder / "generations").is_dir()
    return rows


def check_model_folder(folder: Path, original: Path) -> None:
    """It loads with transformers, with everything that lay beside the original weights, and the weights have moved."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = AutoModelForCausalLM.from_pretrained(original)
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert any(moved)
    tokenizer, known = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(original)
    text = "7 + 8 = ¼?"
    assert tokenizer(text).input_ids == known(text).input_ids and tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id


def test_two_fsdp2_ranks_with_vllm_in_each(mains: Mains, setting: Setting, tmp_path: Path) -> None:
    """The product's main path.  The driver stays light: no engine in its process."""
    modules = tmp_path / "modules"
    modules.mkdir()
    arguments = setting.arguments(
        tmp_path / "run",
        *TWO_RANKS,
        setting.validation,
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
        "trainer.log_val_generations=3",
        "trainer.plugins=[modules_plugin]",
        "trainer.logger=[console,tensorboard]",
    )
    running = mains.start_fresh(arguments, env={"PYTHONPATH": str(setting.folder), "MODULES_OUT": str(modules)})
    finished(running.wait(RAY_TIMEOUT_S))
    assert running.leftovers() == []

    rows = check_run_folder(tmp_path / "run", steps=2, ranks=2)
    assert [sorted(name for name in row if name.startswith("val/pass@")) for row in rows] == [
        ["val/pass@1", "val/pass@2"], [], ["val/pass@1", "val/pass@2"]
    ]  # fmt: skip
    assert "val/words/pass@1" in rows[0]
    assert {name for name in rows[0] if name.startswith("val-core/")} == {
        f"val-core/words/reward/{name}" for name in ("mean@2", "best@2/mean", "best@2/std")
    }
    assert rows[0]["val-core/words/reward/mean@2"] == pytest.approx(rows[0]["val/reward/mean"])
    for row in rows[1:]:
        assert row["actor/grad_norm"] > 0.0
        assert abs(row["mismatch/kl"]) < LARGEST_MISMATCH
    generations = sorted(path.name for path in (tmp_path / "run" / "generations").iterdir())
    assert generations == ["val-000000.jsonl", "val-000002.jsonl"]
    assert len(read_generations(tmp_path / "run" / "generations" / generations[0])) == 3
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    check_model_folder(tmp_path / "run" / "global_step_2" / "actor" / "huggingface", setting.model)

    loaded = set(json.loads((modules / f"{running.pid}.json").read_text()))
    assert {"rlhub", "ray", "torch"} <= loaded, "the hook saw the driver"
    engines = {"rlhub.engines.rollout.vllm.engine", "rlhub.engines.training.fsdp.engine"}
    assert loaded & ({"vllm", "megatron", "peft"} | engines) == set()


def test_an_engine_left_behind_shows_as_mismatch(mains: Mains, setting: Setting, tmp_path: Path) -> None:
    """Control of the bound above: an engine that misses one small update is far beyond it, where a run stops unless told."""
    plugin = ["trainer.plugins=[stale_engine_plugin]", "algorithm.rollout_correction.mismatch_stop=100"]
    environment = {"PYTHONPATH": str(setting.folder)}
    finished(mains.run(setting.arguments(tmp_path / "stale", *plugin), env=environment))
    rows = metrics_of(tmp_path / "stale")
    assert abs(rows[0]["mismatch/kl"]) < LARGEST_MISMATCH < abs(rows[1]["mismatch/kl"])
    finished(mains.run(setting.arguments(tmp_path / "fresh")))
    assert all(abs(row["mismatch/kl"]) < LARGEST_MISMATCH for row in metrics_of(tmp_path / "fresh"))


FULL_COMMAND = """
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
CRITIC_COMMAND = """
    algorithm.adv_estimator=gae critic.optim.lr=1e-5 critic.model.use_remove_padding=True
    critic.model.path=Qwen/Qwen2.5-0.5B-Instruct critic.model.enable_gradient_checkpointing=True
    critic.ppo_micro_batch_size_per_gpu=32 critic.model.fsdp_config.param_offload=False algorithm.use_kl_in_reward=True
    algorithm.kl_ctrl.kl_coef=0.001
"""
FOR_TWO_RANKS = (
    SMALL_CLUSTER, "trainer.device=cpu", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=2",
    "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "data.max_response_length=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def command_folder(mains: Mains) -> Iterator[Path]:
    """The folder the mains run in, with data and models where the command lines look for them."""
    question = "What is {} plus {}?"
    rows = [
        {
            "prompt": [{"role": "user", "content": question.format(number, number + 1)}],
            "data_source": "openai/gsm8k",
            "reward_model": {"style": "rule", "ground_truth": str(2 * number + 1)},
            "extra_info": {"index": number},
        }
        for number in range(8)
    ]
    (mains.folder / "gsm8k").mkdir()
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), mains.folder / "gsm8k" / f"{split}.parquet")
    for seed, name in enumerate(("Qwen2.5-3B-Instruct", "Qwen2.5-0.5B-Instruct")):
        save_chat_model(mains.folder / "Qwen" / name, seed=seed)
    yield mains.folder
    for name in ("gsm8k", "Qwen", "checkpoints"):
        shutil.rmtree(mains.folder / name, ignore_errors=True)


@pytest.mark.parametrize("critic", [False, True], ids=["grpo", "ppo"])
def test_the_established_command_lines(mains: Mains, command_folder: Path, critic: bool) -> None:
    """Word for word, then the sizes of this machine: tensor parallel vLLM over both ranks, several optimizer steps a batch."""
    name = "ppo" if critic else "grpo"
    settings = shlex.split(FULL_COMMAND) + (shlex.split(CRITIC_COMMAND) if critic else [])
    arguments = [*settings, *FOR_TWO_RANKS, f"trainer.experiment_name={name}"]
    running = mains.start(arguments, env={"WANDB_MODE": "offline"})
    finished(running.wait(RAY_TIMEOUT_S))
    assert running.leftovers() == []

    folder = command_folder / "checkpoints" / "gsm8k" / name
    rows = check_run_folder(folder, steps=2, ranks=2)
    assert all("val/pass@1" in row for row in (rows[0], rows[2]))
    for row in rows[1:]:
        assert abs(row["mismatch/kl"]) < LARGEST_MISMATCH
        assert row["actor/kl_loss"] >= 0.0
        assert ("actor/reward_kl_penalty" in row) == critic
        assert all((metric in row) == critic for metric in WITH_CRITIC)
    assert (folder / "global_step_2" / "actor" / "huggingface").is_dir()
    assert (folder / "global_step_2" / "critic").is_dir() == critic
    assert list((folder / "wandb").rglob("*.wandb"))


def steady(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(VARYING) and name not in COUNTED}


def test_two_ranks_go_on_as_one(mains: Mains, setting: Setting, tmp_path: Path) -> None:
    """PPO with critic and KL in the reward.  Steps 1 and 2 on two ranks, step 3 on one from their checkpoint: every number is
    that of one rank all along, so neither the cut over ranks nor the resume changes what is learned."""
    settings = (
        setting.validation,
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.9",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_ctrl.kl_coef=0.1",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "critic.optim.lr=1e-3",
        "trainer.save_freq=2",
        "trainer.test_freq=1",
    )
    parted = tmp_path / "parted"
    finished(mains.start(setting.arguments(parted, *settings, *TWO_RANKS)).wait(RAY_TIMEOUT_S))
    assert [row["step"] for row in check_run_folder(parted, steps=2, ranks=2)] == [0, 1, 2]
    three_steps = "trainer.total_training_steps=3"
    resumed = finished(mains.run(setting.arguments(parted, *settings, three_steps)))
    assert "continuing at step 3 of 3" in resumed.output

    whole = tmp_path / "whole"
    finished(mains.run(setting.arguments(whole, *settings, three_steps)))
    got, expected = metrics_of(parted), metrics_of(whole)
    assert [row["step"] for row in got] == [0, 1, 2, 3]
    for got_row, expected_row in zip(got, expected, strict=True):
        assert steady(got_row) == pytest.approx(steady(expected_row), rel=2e-3, abs=1e-5)
        assert all(got_row.get(name) == pytest.approx(expected_row.get(name), abs=0.02) for name in COUNTED)
    assert expected[3]["actor/reward_kl_penalty"] > 0.0 and "critic/vf_explained_var" in expected[3]
    distance = abs(expected[1]["critic/vf_loss"] - expected[3]["critic/vf_loss"])
    assert distance > 2e-3 * expected[3]["critic/vf_loss"], "a step that repeated another would be noticed"


def test_rloo_in_process(mains: Mains, setting: Setting, tmp_path: Path) -> None:
    """One rank, no Ray.  The advantage is the reward less that of the other samples, so it has no mean; no step is wasted."""
    finished(mains.run(setting.arguments(tmp_path, setting.validation, "algorithm.adv_estimator=rloo")))
    rows = metrics_of(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert abs(row["mismatch/kl"]) < LARGEST_MISMATCH and row["actor/grad_norm"] > 0.0
        assert row["critic/advantages/max"] > 0.0 > row["critic/advantages/min"]
        assert "timing_s/compute_log_prob" not in row, "the update's own forward pass is the policy that sampled"
        assert "timing_s/compute_ref_log_prob" not in row and "critic/vf_loss" not in row


ON_MEGATRON = (
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.lora_sync=adapter",
)


@pytest.mark.parametrize("options", [(), ON_MEGATRON], ids=["fsdp2, merged", "megatron, adapters alone"])
def test_lora_with_its_own_reference(mains: Mains, setting: Setting, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Two ranks.  The reference is the policy with adapters off: no KL before the first update, some after it; the engine has
    the adapters (no mismatch), the saved model too, and nothing but a low-rank change of linear layers is learned."""
    rank = 4
    arguments = setting.arguments(
        tmp_path,
        *TWO_RANKS,
        f"actor_rollout_ref.model.lora_rank={rank}",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_coef=0.01",
        "trainer.save_freq=2",
        *options,
    )
    finished(mains.start(arguments).wait(RAY_TIMEOUT_S))
    first, second = metrics_of(tmp_path)
    assert first["actor/kl_loss"] == pytest.approx(0.0, abs=1e-9) and second["actor/kl_loss"] > 1e-6
    assert max(abs(first["mismatch/kl"]), abs(second["mismatch/kl"])) < LARGEST_MISMATCH

    folder = tmp_path / "global_step_2" / "actor" / "huggingface"
    check_model_folder(folder, setting.model)
    adapter = json.loads((folder.parent / "adapter" / "adapter_config.json").read_text())
    assert (adapter["peft_type"], adapter["r"]) == ("LORA", rank)
    assert load_file(folder.parent / "adapter" / "adapter_model.safetensors")
    before, after = load_file(setting.model / "model.safetensors"), load_file(folder / "model.safetensors")
    assert before.keys() == after.keys()
    for name, weight in after.items():
        change = weight.double() - before[name].double()
        if "_proj.weight" not in name:
            assert not change.any(), name
            continue
        sizes = torch.linalg.svdvals(change)
        assert sizes[0] > 0.0 and sizes[rank] < 1e-3 * sizes[0], name


def test_supervised_then_evaluated(mains: Mains, setting: Setting, tmp_path: Path) -> None:
    """main_sft on two ranks learns conversations; main_eval of its checkpoint samples what transformers samples from it."""
    talks = [
        {"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]}
        for word in ("aye", "nay", "oh", "hm") * 4
    ]
    pq.write_table(pa.Table.from_pylist(talks), tmp_path / "talks.parquet")
    sft = [
        f"data.train_files={tmp_path / 'talks.parquet'}",
        f"data.val_files={tmp_path / 'talks.parquet'}",
        "data.train_batch_size=8",
        "data.max_length=48",
        f"model.path={setting.model}",
        "optim.lr=3e-3",
        "trainer.device=cpu",
        *TWO_RANKS,
        "trainer.total_training_steps=6",
        "trainer.test_freq=6",
        "trainer.save_freq=6",
        f"trainer.default_local_dir={tmp_path / 'sft'}",
    ]
    finished(mains.start(sft, module="rlhub.trainer.main_sft").wait(RAY_TIMEOUT_S))
    rows = metrics_of(tmp_path / "sft")
    assert rows[-1]["val/loss"] < 0.8 * rows[0]["val/loss"]
    assert rows[0]["val/loss"] == pytest.approx(math.log(259), rel=0.1), "the random model knows nothing"
    folder = tmp_path / "sft" / "global_step_6" / "model" / "huggingface"
    check_model_folder(folder, setting.model)

    evaluation = [
        setting.validation,
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        f"actor_rollout_ref.model.path={folder}",
        "actor_rollout_ref.rollout.name=hf",
        f"custom_reward_function.path={setting.folder / 'reward.py'}",
        "trainer.device=cpu",
        "trainer.backend=local",
        f"trainer.default_local_dir={tmp_path / 'eval'}",
    ]
    result = finished(mains.run(evaluation, module="rlhub.trainer.main_eval"))
    (row,) = metrics_of(tmp_path / "eval")
    assert row["step"] == 0 and f"val/pass@1: {row['val/pass@1']:.4f}" in result.output
    samples = read_generations(tmp_path / "eval" / "generations" / "val-000000.jsonl")
    assert len(samples) == row["val/num_prompts"] == 4
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for sample in samples:
        prompt = tokenizer(sample.prompt, return_tensors="pt").input_ids
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=6)
        assert tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True) == sample.response
