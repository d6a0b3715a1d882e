"""Sequence classifiers for tests, made of a language model's folder, and what transformers itself says of a row."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification

SIDECARS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def save_reward_model(folder: Path, base: Path, *, sign: float = 1.0, seed: int = 0, num_labels: int = 1) -> Path:
    """A classifier on `base`'s transformer with a random head times `sign`, and its tokenizer; returns the folder."""
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_labels)
    weight = model.score.weight.data
    weight.copy_(sign * torch.randn(weight.shape, generator=torch.Generator().manual_seed(seed)))
    model.save_pretrained(folder)
    for name in SIDECARS:
        if (base / name).is_file():
            shutil.copy(base / name, folder / name)
    return folder


@torch.no_grad()
def plain_scores(folder: Path, rows: list[list[int]]) -> list[float]:
    """Each row alone, without padding, by transformers' own class."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    return [float(model(torch.tensor([ids])).logits[0, 0]) for ids in rows]
