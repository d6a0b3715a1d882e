"""main_dpo and main_rm from files to checkpoints, in process: they learn what the labels say and nothing else, resume bit for
bit, and leave models that transformers loads."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from rlhub.config import cli
from rlhub.config.sections.preference import DPOConfig, RMConfig
from rlhub.errors import ConfigError
from rlhub.trainer import main_dpo, main_rm
from rlhub.trainer.preflight.checks import check
from scripts.bench.tiny_model import build
from tests.support.metrics import rows_of

VOCABULARY, BETA = 64, 0.1
MAINS: dict[str, tuple[type, Callable[[Any], int]]] = {"dpo": (DPOConfig, main_dpo.main), "rm": (RMConfig, main_rm.main)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    build(folder, hidden=32, layers=2, vocab_size=VOCABULARY)
    return folder


def write_pairs(path: Path, count: int, seed: int, relabel: str = "") -> Path:
    """Chosen are answers of even words, rejected of odd ones.  relabel: "swapped", or "shuffled": a coin says which is which."""
    rng = random.Random(seed)

    def answer(parity: int) -> str:
        return " ".join(f"w{2 * rng.randint(1, 30) + parity}" for _ in range(rng.randint(1, 4)))

    rows = []
    for _ in range(count):
        pair = [answer(0), answer(1)]
        if relabel == "swapped" or (relabel == "shuffled" and rng.random() < 0.5):
            pair.reverse()
        prompt = " ".join(f"w{rng.randint(2, 63)}" for _ in range(rng.randint(1, 3)))
        rows.append({"prompt": prompt, "chosen": pair[0], "rejected": pair[1], "gap": rng.random()})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(kind: str, model: Path, folder: Path, *settings: str, relabel: str = "", val_relabel: str = "") -> list[dict[str, Any]]:
    """Train in this process; returns the lines of metrics.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    train = write_pairs(folder / "train.jsonl", 64, 1, relabel)
    val = write_pairs(folder / "val.jsonl", 200, 2, val_relabel)
    overrides = [
        f"data.train_files={train}",
        f"data.val_files={val}",
        "data.train_batch_size=16",
        "data.max_length=16",
        f"model.path={model}",
        "model.enable_gradient_checkpointing=False",
        "optim.lr=3e-3",
        "trainer.backend=local",
        "trainer.device=cpu",
        f"trainer.default_local_dir={folder / 'run'}",
        *settings,
    ]
    config_class, main = MAINS[kind]
    assert main(cli.prepare(config_class, kind, overrides, preflight=check)) == 0
    return rows_of(folder / "run")


def saved(folder: Path, step: int) -> Path:
    return folder / "run" / f"global_step_{step}" / "model" / "huggingface"


STEPS = ("trainer.total_training_steps=24", "trainer.test_freq=24")


def test_a_reward_model_learns_what_separates(model: Path, tmp_path: Path) -> None:
    rows = run("rm", model, tmp_path, *STEPS)
    assert rows[0]["val/accuracy"] < 0.8 and rows[-1]["val/accuracy"] > 0.9
    assert rows[-1]["val/loss"] < 0.5 * rows[0]["val/loss"] and rows[-1]["rewards/margins"] > 1.0
    assert rows[-1]["train/pairs"] == 16 and rows[-1]["train/skipped_steps"] == 0


def test_labels_by_a_coin_teach_a_reward_model_nothing(model: Path, tmp_path: Path) -> None:
    """The control: 200 validation pairs with labels by a coin, standard error 0.035."""
    rows = run("rm", model, tmp_path, *STEPS, relabel="shuffled", val_relabel="shuffled")
    assert rows[-1]["val/accuracy"] == pytest.approx(0.5, abs=0.14)
    assert rows[-1]["val/loss"] > 0.9 * math.log(2)


def test_a_margin_widens_the_gap(model: Path, tmp_path: Path) -> None:
    plain, wide = (run("rm", model, tmp_path / name, *STEPS, *more) for name, more in (("a", ()), ("b", ("margin_key=gap",))))
    assert wide[1]["train/loss"] > plain[1]["train/loss"] and wide[-1]["val/margin"] > plain[-1]["val/margin"]


@pytest.mark.parametrize(
    ("settings", "right", "margin"),
    [((), 0.9, 0.1), (("model.lora_rank=8", "optim.lr=3e-2"), 0.65, 0.02)],
    ids=["full", "lora"],
)
def test_dpo_raises_the_margin_and_swapped_labels_lower_it(
    model: Path, tmp_path: Path, settings: tuple[str, ...], right: float, margin: float
) -> None:
    """Adapters learn less: a random model's embeddings, frozen then, hardly tell even words from odd ones."""
    rows = run("dpo", model, tmp_path / "right", *STEPS, *settings)
    assert rows[0]["val/loss"] == pytest.approx(math.log(2), abs=1e-6) and rows[0]["val/accuracy"] == 0.5
    assert rows[1]["train/loss"] == pytest.approx(math.log(2), abs=1e-6) and rows[1]["rewards/margins"] == 0.0
    assert rows[-1]["val/accuracy"] > right and min(rows[-1]["val/margin"], rows[-1]["rewards/margins"]) > margin
    first, last = (  # epochs of the same 64 pairs in 4 batches
        sum(row["logps/chosen"] - row["logps/rejected"] for row in epoch) for epoch in (rows[1:5], rows[21:25])
    )
    assert last > first
    swapped = run("dpo", model, tmp_path / "swapped", *STEPS, *settings, relabel="swapped")
    assert swapped[-1]["val/accuracy"] < 1 - right and swapped[-1]["val/margin"] < -margin, "validated with the right labels"


@pytest.mark.parametrize("loss", ["ipo", "hinge"])
def test_other_losses_learn(model: Path, tmp_path: Path, loss: str) -> None:
    rows = run("dpo", model, tmp_path, *STEPS, f"dpo.loss_type={loss}", "optim.lr=1e-3")
    start = {"ipo": (0.5 / BETA) ** 2, "hinge": 1.0}[loss]
    assert rows[0]["val/loss"] == pytest.approx(start, rel=1e-5)
    assert rows[-1]["val/accuracy"] > 0.9 and rows[-1]["val/loss"] < 0.9 * start


def direct(model: Any, tokenizer: Any, row: dict[str, Any], answer: str) -> float:
    """log pi of an answer with its end token: one row, no padding."""
    prompt, ids = tokenizer(row["prompt"]).input_ids, tokenizer(row[answer]).input_ids + [tokenizer.eos_token_id]
    with torch.no_grad():
        log_p = model(torch.tensor([prompt + ids])).logits[0].double().log_softmax(-1)
    return math.fsum(float(log_p[len(prompt) + place - 1, token]) for place, token in enumerate(ids))


def test_dpo_agrees_with_plain_transformers(model: Path, tmp_path: Path) -> None:
    """The saved policy and the starting model, row by row, give the validation loss and accuracy that were logged."""
    row = run("dpo", model, tmp_path, "trainer.total_training_steps=4", "trainer.test_freq=4", "dpo.label_smoothing=0.1")[-1]
    policy = AutoModelForCausalLM.from_pretrained(saved(tmp_path, 4))
    base, tokenizer = AutoModelForCausalLM.from_pretrained(model), PreTrainedTokenizerFast.from_pretrained(model)
    losses, right = [], 0
    for line in (tmp_path / "val.jsonl").read_text().splitlines():
        pair = json.loads(line)
        won, lost = (
            direct(policy, tokenizer, pair, name) - direct(base, tokenizer, pair, name) for name in ("chosen", "rejected")
        )
        logit = BETA * (won - lost)
        losses.append(0.9 * math.log1p(math.exp(-logit)) + 0.1 * math.log1p(math.exp(logit)))
        right += won > lost
    assert row["val/loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-6)
    assert row["val/accuracy"] == pytest.approx(right / len(losses), abs=1e-9)


def test_a_reward_model_loads_as_a_classifier(model: Path, tmp_path: Path) -> None:
    """And its scores, read by transformers from single rows, give the validation loss that was logged."""
    row = run("rm", model, tmp_path, "trainer.total_training_steps=4", "trainer.test_freq=4")[-1]
    classifier, loading = AutoModelForSequenceClassification.from_pretrained(saved(tmp_path, 4), output_loading_info=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(saved(tmp_path, 4))
    assert not any(loading.values()) and classifier.config.num_labels == 1
    losses = []
    for line in (tmp_path / "val.jsonl").read_text().splitlines():
        pair = json.loads(line)
        texts = [[pair["prompt"] + " " + pair[name] + " <eos>"] for name in ("chosen", "rejected")]
        with torch.no_grad():
            won, lost = (float(classifier(torch.tensor(tokenizer(text).input_ids)).logits[0, 0]) for text in texts)
        losses.append(math.log1p(math.exp(lost - won)))
    assert row["val/loss"] == pytest.approx(math.fsum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("dpo", ()), ("dpo", ("model.lora_rank=4", "optim.lr=1e-2")), ("rm", ("margin_key=gap",))],
    ids=["dpo", "dpo_lora", "rm"],
)
def test_resume_is_bit_identical(model: Path, tmp_path: Path, kind: str, settings: tuple[str, ...]) -> None:
    """7 steps in one go, and 3 with a checkpoint and then the rest, over the end of an epoch of 4 steps."""
    whole = run(kind, model, tmp_path / "whole", "trainer.total_training_steps=7", *settings)
    run(kind, model, tmp_path / "parts", "trainer.total_training_steps=3", *settings)
    parts = run(kind, model, tmp_path / "parts", "trainer.total_training_steps=7", *settings)
    assert [row["step"] for row in parts] == [row["step"] for row in whole] == list(range(8))
    for one, other in zip(whole, parts, strict=True):
        names = [name for name in one if name.startswith(("train/", "rewards/", "logps/", "val/"))]
        assert names and [one[name] for name in names] == [other[name] for name in names]
    weights = [load_file(saved(tmp_path / name, 7) / "model.safetensors") for name in ("whole", "parts")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_other_data_do_not_resume(model: Path, tmp_path: Path) -> None:
    run("dpo", model, tmp_path, "trainer.total_training_steps=2")
    with pytest.raises(Exception, match="not the one the run was started with"):
        run("dpo", model, tmp_path, "trainer.total_training_steps=3", relabel="swapped")


def test_cuts_change_nothing(model: Path, tmp_path: Path) -> None:
    losses = []
    for name, settings in (
        ("whole", ()),
        ("pairs", ("data.micro_batch_size_per_gpu=3",)),
        ("tokens", ("data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=32")),
    ):
        rows = run("dpo", model, tmp_path / name, "trainer.total_training_steps=4", *settings)
        losses.append([row["train/loss"] for row in rows[1:]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_errors_before_anything_starts(model: Path, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"prompt": "w2", "chosen": "w3", "rejectd": "w4"}\n')
    (tmp_path / "none.jsonl").touch()
    overrides = [
        f"data.train_files=[{tmp_path / 'one.jsonl'},{tmp_path / 'none.jsonl'}]",
        f"model.path={model}",
        "trainer.device=cpu",
        "dpo.loss_type=sigmod",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]
    with pytest.raises(ConfigError) as caught:
        cli.prepare(DPOConfig, "dpo", overrides, preflight=check)
    text = str(caught.value)
    assert "no column 'rejected' (data.rejected_key); did you mean 'rejectd'?" in text
    assert "none.jsonl is empty" in text and "did you mean 'sigmoid'?" in text
    assert not (tmp_path / "run").exists()
