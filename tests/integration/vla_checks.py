"""What the ranks of test_vla.py run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.config.sections.actor import ActorConfig, PolicyLossConfig
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.updates import PolicyUpdater
from tests.support.vla import ACTION_DIM, CPU, model_config, train_engine

SETTINGS: dict[str, Any] = {"value_loss_coef": 0.5, "entropy_coeff": 0.01, "log_prob_level": "chunk"}


def my_rows(rows: dict[str, Tensor], uneven: bool) -> dict[str, Tensor]:
    """This rank's rows; uneven: the last rank of several has none."""
    world, rank = dist.get_world_size(), dist.get_rank()
    owners = max(world - 1, 1) if uneven else world
    mine = torch.arange(len(rows["input_ids"])) % owners == rank
    return {name: column[mine] for name, column in rows.items()}


def updated(
    folder: str, rows: dict[str, Tensor], decoding: str, micro: int | None, uneven: bool, loss: str = "vanilla", **changes: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradient of one optimizer step, by weight, and its metrics."""
    ensure_process_group(CPU)
    engine = train_engine(model_config(Path(folder), decoding), rows=micro)
    engine.optimizer.apply = lambda rate, scale: gradients.update(gathered(engine))  # type: ignore[union-attr, method-assign]
    gradients: dict[str, Tensor] = {}
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=loss), **(SETTINGS | changes))
    updater = PolicyUpdater(engine, config, scale=1.0, correction=RolloutCorrectionConfig(), action_dim=ACTION_DIM)
    metrics = updater.update(my_rows(rows, uneven), 1)
    return gradients, metrics


def limited(folder: str, rows: dict[str, Tensor], target_kl: float) -> dict[str, float]:
    """The metrics of three epochs at most; the last rank has no rows."""
    return updated(folder, rows, "causal", None, True, ppo_epochs=3, target_kl=target_kl)[1]


def gathered(engine: Any) -> dict[str, Tensor]:
    """The whole gradient of every weight, on every rank."""
    found = {}
    for param in engine.params:
        local = param.local_grad
        own = torch.zeros(param.global_shape)
        if local is not None:
            own[param.offset : param.offset + local.shape[0]] = local
        if dist.get_world_size() > 1:
            dist.all_reduce(own)
        found[param.name] = own
    return found
