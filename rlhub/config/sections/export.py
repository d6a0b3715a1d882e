"""The root of `python -m rlhub.trainer.main_export`'s configuration, and what can be said of it before anything starts."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhub.config.schema import PositiveFloat


@dataclass(slots=True, kw_only=True)
class ExportConfig:
    checkpoint: str | None = None
    """What to export: a run folder (`step` chooses a checkpoint of it) or a global_step_<n> folder. Required."""
    output: str | None = None
    """Folder to make; it must not exist yet. Required."""
    step: Literal["latest", "best"] | int = "latest"
    """Which checkpoint of a run folder: latest, best (by `best_metric`), or a step's number."""
    best_metric: str | None = None
    """With step=best, the metric to go by (for example val/pass@1), higher is better; null: the run's trainer.keep_best."""
    role: Literal["actor", "critic", "model"] | None = None
    """Whose weights: actor and critic of reinforcement learning, model of the other trainers; null: actor or model, whichever
    there is."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of the exported weights; null: as they were trained. bf16 halves the size and is what most servers load."""
    max_shard_gb: PositiveFloat = 4.0
    """Largest weight file in GiB. Smaller files load with less memory."""
    verify: bool = False
    """Load the result with plain transformers and compare it with a training engine that loads the checkpoint's shards:
    log-probs of some token rows, and every weight. Needs memory for three copies in fp32."""
    model_path: str | None = None
    """Model that configuration and tokenizer are taken from; null: the checkpoint's own copy, or the model it was trained from.
    Set it when both are gone."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


def problems(config: ExportConfig, set_keys: AbstractSet[str]) -> list[str]:
    """What is missing or in the way; looks at paths, reads nothing."""
    found = []
    if not config.checkpoint:
        found.append("checkpoint is not set: name a run folder or one of the checkpoints in it")
    elif not Path(config.checkpoint).is_dir():
        found.append(f"checkpoint: no such folder: {config.checkpoint}")
    if not config.output:
        found.append("output is not set: name the folder to make")
    elif Path(config.output).exists():
        found.append(f"output: {config.output} exists, and nothing is overwritten; name another folder or remove it")
    if config.best_metric is not None and config.step != "best":
        found.append("best_metric is read with step=best only; set that too, or leave best_metric out")
    return found
