"""The main job on a mixture of experts with the rollout's routing replayed, in process with fsdp2, through Ray with megatron."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import VOCABULARY, Mains, Task
from tests.support.metrics import rows_of

ACTOR = "actor_rollout_ref.actor"
TWO_RANKS = ("trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.ray_init.object_store_memory=300000000")
MEGATRON = (*TWO_RANKS, f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.tensor_model_parallel_size=2")
REPLAY = f"{ACTOR}.router_replay=rollout"
RAY_TIMEOUT_S = 500.0
VARYING = ("timing_", "perf/", "memory/", "actor/expert")
"""What differs between runs, and the load of experts, which counts what fills a pass up."""


@pytest.fixture(scope="module")
def experts(task: Task) -> Path:
    """A mixture of experts for the task's data."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from scripts.bench.tiny_model import build

    folder = task.folder / "experts"
    build(folder, hidden=32, layers=2, vocab_size=VOCABULARY)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def test_replay_keeps_engines_of_two_dtypes_close(mains: Mains, task: Task, experts: Path, tmp_path: Path) -> None:
    """The rollout computes in bfloat16, the trainer in float32; the pass for old log-probs and the updates replay, the reference
    does not.  Both training engines make the same of it, and without replay the mismatch is larger."""
    common = (
        f"actor_rollout_ref.model.path={experts}",
        "actor_rollout_ref.rollout.dtype=bfloat16",
        "trainer.total_training_steps=2",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.use_kl_loss=true",
    )
    runs = {"off": (), "fsdp2": (REPLAY,), "megatron": (REPLAY, *MEGATRON)}
    started = {name: mains.start(task.arguments(tmp_path / name, *common, *more)) for name, more in runs.items()}
    for run in started.values():
        result = run.wait(RAY_TIMEOUT_S)
        assert result.code == 0 and "Traceback" not in result.output, result.output
    off, fsdp2, megatron = (rows_of(tmp_path / name) for name in runs)
    for without, one, other in zip(off, fsdp2, megatron, strict=True):
        assert one["mismatch/k3"] < 0.5 * without["mismatch/k3"]
        assert one["actor/kl_loss"] > 0
        shared = {name: value for name, value in one.items() if not name.startswith(VARYING) and name in other}
        assert {name: other[name] for name in shared} == pytest.approx(shared, rel=5e-3, abs=1e-4)


def test_engines_that_tell_no_experts_are_refused(mains: Mains, task: Task, experts: Path, tmp_path: Path) -> None:
    """Before anything starts, with what to set instead."""
    model = f"actor_rollout_ref.model.path={experts}"
    refused = {
        "which needs Triton and so a GPU; set actor_rollout_ref.rollout.name=hf": (model, "actor_rollout_ref.rollout.name=vllm"),
        "the model is a qwen2 without experts, so there is no routing to replay; set it to disabled": (),
    }
    runs = [mains.start(task.arguments(tmp_path / str(n), REPLAY, *more)) for n, more in enumerate(refused.values())]
    for run, told in zip(runs, refused, strict=True):
        result = run.wait()
        assert result.code == 2 and told in result.output, result.output
