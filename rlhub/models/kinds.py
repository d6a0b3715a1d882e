"""Kinds of models; which checkpoints can be a reward model, told from `config.json`.  Loads neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

ModelKind = Literal["policy", "value", "reward"]
"""policy: a distribution over the next token; value: a number a token; reward: a number a row."""
SCALAR_HEAD = "score"
"""The linear layer of transformers' sequence classifiers: hidden size -> 1, without bias."""

CLASSIFIER = "ForSequenceClassification"
LANGUAGE_MODEL = "ForCausalLM"
DEFAULT_LABELS = 2  # what transformers takes where config.json names no labels


def reward_problem(path: str, architectures: Sequence[str], num_labels: int) -> str | None:
    """What is wrong with the checkpoint: it must be a sequence classifier with one label, or a causal language model (which
    gets a new head)."""
    if not all(name.endswith((CLASSIFIER, LANGUAGE_MODEL)) for name in architectures):
        return (
            f"{path!r} holds {', '.join(architectures)}: a reward model is a sequence classifier with one label or a causal "
            "language model (which gets a new head); name another model"
        )
    if any(name.endswith(CLASSIFIER) for name in architectures) and num_labels != 1:
        return f"{path!r} is a classifier with {num_labels} labels: a reward model has 1; name another model"
    return None


def read_labels(folder: Path) -> tuple[list[str], int]:
    """(architectures, number of labels) of a model folder whose config.json can be read."""
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    labels = values.get("id2label")
    return list(values.get("architectures") or ()), len(labels) if labels else int(values.get("num_labels", DEFAULT_LABELS))
