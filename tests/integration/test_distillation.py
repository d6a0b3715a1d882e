"""On-policy distillation by main_ppo: the student's distribution comes to the teacher's, of whichever teacher it is given."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhub.config.cli import prepare
from rlhub.config.sections.export import ExportConfig
from rlhub.config.sections.ppo import PPOConfig
from rlhub.errors import ConfigError
from rlhub.trainer import main_export
from rlhub.trainer.main_ppo import fit
from rlhub.trainer.preflight.weights import check_model_weights
from scripts.bench.tiny_model import build

VOCABULARY, PROMPTS, RESPONSE, STEPS = 16, 16, 6, 90
CLOSE = 0.05
"""Nats a token."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models of one shape, whose weights are large enough that they disagree, and prompts of two words."""
    folder = tmp_path_factory.mktemp("inputs")
    for seed, name in enumerate(("student", "teacher", "stranger")):
        build(folder / name, hidden=32, layers=2, vocab_size=VOCABULARY, seed=seed)
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5 if parameter.dim() > 1 else 1)
        model.save_pretrained(folder / name)
    rows = [
        {"prompt": f"w{2 + row % 14} w{2 + row // 14}", "data_source": "words", "reward_model": {"ground_truth": ""}}
        for row in range(4 * PROMPTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text("def compute_score(**_):\n    return 0.0\n")
    return folder


def overrides(inputs: Path, teacher: str, folder: Path) -> list[str]:
    return [
        f"data.train_files={inputs / 'train.parquet'}",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=4",
        f"data.max_response_length={RESPONSE}",
        f"actor_rollout_ref.model.path={inputs / 'student'}",
        f"actor_rollout_ref.ref.model.path={inputs / teacher}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.rollout.n=8",
        "actor_rollout_ref.rollout.name=hf",
        f"custom_reward_function.path={inputs / 'reward.py'}",
        "algorithm.adv_estimator=on_policy_distillation",
        "reward_model.num_workers=1",
        "trainer.device=cpu",
        "trainer.backend=local",
        "trainer.total_epochs=100",
        f"trainer.total_training_steps={STEPS}",
        "trainer.logger=[]",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


def distilled(inputs: Path, teacher: str, folder: Path) -> Path:
    """Trains the student and returns its weights as a Hugging Face folder."""
    assert fit(prepare(PPOConfig, "ppo", overrides(inputs, teacher, folder))) == 0
    export = [f"checkpoint={folder / 'run'}", f"output={folder / 'model'}"]
    assert main_export.main(prepare(ExportConfig, "export", export)) == 0
    return folder / "model"


def reverse_kl(student: Path, teacher: Path) -> float:
    """The KL of student and teacher in nats a token, over all places of the student's own answers."""
    policy, other = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (student, teacher))
    prompts = torch.tensor([[2 + row % 14, 2 + row // 14] for row in range(4 * PROMPTS)])
    torch.manual_seed(0)
    rows = policy.generate(prompts, max_new_tokens=RESPONSE, do_sample=True, top_k=0, pad_token_id=0)
    with torch.no_grad():
        ours, theirs = (model(rows).logits.double().log_softmax(-1)[:, 1:-1] for model in (policy, other))
    written = (rows[:, 2:] != 0) & ((rows[:, 2:] == 1).cumsum(1) - (rows[:, 2:] == 1).long() == 0)
    return float((ours.exp() * (ours - theirs)).sum(-1)[written].mean())


def test_the_student_comes_to_its_teacher(inputs: Path, tmp_path: Path) -> None:
    """Control: a student of another teacher is as far from this one as before."""
    before = reverse_kl(inputs / "student", inputs / "teacher")
    student = distilled(inputs, "teacher", tmp_path / "student")
    other = distilled(inputs, "stranger", tmp_path / "other")
    found = {
        "before": before,
        "student": reverse_kl(student, inputs / "teacher"),
        "other": reverse_kl(other, inputs / "teacher"),
        "other of its own": reverse_kl(other, inputs / "stranger"),
    }
    assert found["student"] < CLOSE and found["other of its own"] < CLOSE, found
    assert before > 3 * CLOSE and found["other"] > 3 * CLOSE, found


def test_a_teacher_of_another_vocabulary_is_refused(inputs: Path, tmp_path: Path) -> None:
    """Before any process starts."""
    build(tmp_path / "other", hidden=32, layers=2, vocab_size=VOCABULARY)
    tokens = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["w2"], vocabulary["w3"] = vocabulary["w3"], vocabulary["w2"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokens))
    config = prepare(PPOConfig, "ppo", overrides(inputs, str(tmp_path / "other"), tmp_path))
    with pytest.raises(ConfigError, match="other ids than that of the policy for 2 tokens, for example 'w2'"):
        check_model_weights(config)
    check_model_weights(prepare(PPOConfig, "ppo", overrides(inputs, "teacher", tmp_path)))
