"""What the ranks of test_checkpoint_matrix.py run: training, saved under one layout and continued under others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.checkpoint.shard_reader import ShardReader
from rlhub.engines.training.base import TrainEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.protocol.weights.pieces import Piece
from rlhub.workers.base import load_engine, save_engine
from tests.integration.fsdp_checks import POLICY_OUTPUTS, loss_for, make_rows
from tests.integration.megatron_checks import make_engine, own_rows, ranks_of

LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fsdp on 1": ("fsdp", 1, {}),
    "fsdp on 2": ("fsdp", 2, {}),
    "fsdp on 2 x 2 copies": ("fsdp", 4, {"fsdp_size": 2}),
    "megatron on 1": ("megatron", 1, {}),
    "dp2": ("megatron", 2, {}),
    "dp2, whole optimizers": ("megatron", 2, {"use_distributed_optimizer": False}),
    "tp2": ("megatron", 2, {"tensor_model_parallel_size": 2}),
    "pp2": ("megatron", 2, {"pipeline_model_parallel_size": 2}),
    "ep2": ("megatron", 2, {"expert_model_parallel_size": 2}),
    "tp2 dp2": ("megatron", 4, {"tensor_model_parallel_size": 2}),
    "tp2 pp2": ("megatron", 4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "ep2 dp2": ("megatron", 4, {"expert_model_parallel_size": 2}),
}
"""Name -> (backend, ranks, its settings)."""
STEPS = 2
Losses = list[float]


def build(layout: str, path: str) -> TrainEngine:
    backend, _, settings = LAYOUTS[layout]
    optim = {"lr": 3e-3, "lr_scheduler_type": "cosine", "total_training_steps": 8, "lr_warmup_steps": 4}
    return make_engine(path, "policy", backend, layout=settings, optim=optim, micro_batch=MicroBatchConfig(rows=3))


def train(engine: TrainEngine, steps: range) -> Losses:
    """The loss of each step, before it was taken."""
    losses = []
    for step in steps:
        rows = make_rows(100 + step)
        losses.append(engine.forward_backward(own_rows(rows, engine), loss_for("policy", rows), outputs=POLICY_OUTPUTS)["loss"])
        engine.optimizer_step()
    return losses


def save(layout: str, path: str, folder: str, rendezvous: str) -> Losses:
    """Train, save as a worker does, train on: the losses of the two steps that follow."""
    with ranks_of(LAYOUTS[layout][1], rendezvous) as taking_part:
        if not taking_part:
            return []
        engine = build(layout, path)
        train(engine, range(STEPS))
        save_engine(engine, Path(folder), dist.get_rank(), dist.get_world_size())
        return train(engine, range(STEPS, STEPS + 2))


def forget_moments(read: Callable[[ShardReader, Piece], Tensor]) -> Callable[[ShardReader, Piece], Tensor]:
    def forgetful(reader: ShardReader, piece: Piece) -> Tensor:
        stored = read(reader, piece)
        return torch.zeros_like(stored) if piece.name.startswith("optim.") else stored

    return forgetful


def resume(layout: str, path: str, folders: dict[str, str], forget: bool, rendezvous: str) -> dict[str, Losses]:
    """By source: the losses of two steps after loading.  One engine loads all, so each load has to replace everything."""
    read = forget_moments(ShardReader.read) if forget else ShardReader.read
    with ranks_of(LAYOUTS[layout][1], rendezvous) as taking_part:
        if not taking_part:
            return {}
        engine = build(layout, path)
        losses = {}
        for source, folder in folders.items():
            with mock.patch.object(ShardReader, "read", read):
                load_engine(engine, Path(folder))
            losses[source] = train(engine, range(STEPS, STEPS + 2))
        return losses
