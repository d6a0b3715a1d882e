"""The root of `python -m rlhub.trainer.main_export`'s configuration, and its checks before the export starts."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlhub.config.schema import PositiveFloat


@dataclass(slots=True, kw_only=True)
class ExportConfig:
    checkpoint: str | None = None
    """Run folder (`step` chooses a checkpoint of it) or global_step_<n> folder to export. Required."""
    output: str | None = None
    """Folder to create; it must not exist yet. Required."""
    step: Literal["latest", "best"] | int = "latest"
    """Checkpoint of a run folder: latest, best (by `best_metric`), or the number of a step."""
    best_metric: str | None = None
    """With step=best, the metric whose highest value is best (for example val/pass@1); null: the run's trainer.keep_best."""
    role: Literal["actor", "critic", "model"] | None = None
    """Role whose weights are exported: actor or critic of reinforcement learning, model of the other trainers; null: actor or
    model, whichever the checkpoint has."""
    dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Dtype of the exported weights; null: the dtype in which they were trained. bf16 halves the size of fp32, and most servers
    load it."""
    max_shard_gb: PositiveFloat = 4.0
    """Largest weight file in GiB; smaller files load with less memory."""
    verify: bool = False
    """Load the result with plain transformers and compare it with a training engine that loads the checkpoint's shards:
    log-probs of some token rows, and every weight. It needs memory for three copies in fp32."""
    model_path: str | None = None
    """Model whose configuration and tokenizer are exported; null: the checkpoint's own copy, or the model it was trained from.
    Set it when both are gone."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models whose code you have read."""


def problems(config: ExportConfig, set_keys: AbstractSet[str]) -> list[str]:
    """Returns the problems of missing settings and of paths.  It reads no file."""
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
