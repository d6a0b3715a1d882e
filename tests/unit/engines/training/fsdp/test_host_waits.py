"""Between a micro-batch's start and end the host waits for nothing: whole updates on a device without numbers to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhub.algorithms.registry import POLICY_LOSSES
from rlhub.config.sections.actor import ActorConfig, PolicyLossConfig
from rlhub.config.sections.ppo import CriticConfig
from rlhub.config.sections.rollout_correction import RolloutCorrectionConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig
from rlhub.engines.training import packing
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows, StepReport
from rlhub.engines.training.fsdp import building
from rlhub.engines.training.fsdp.building import BuildPlan
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.engines.training.updates import PolicyUpdater, ValueUpdater
from tests.support.host_waits import HostWait, NoHostWaits
from tests.support.tiny_models import VOCABULARY, save_tiny_model

META = torch.device("meta")
PROMPT, RESPONSE, ROWS = 3, 5, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    save_tiny_model(found)
    return found


def engine_on_meta(folder: Path, kind: Any = "policy", *, pack: bool = True, share: bool = False, stored: bool = True) -> Any:
    """An engine with a real model on the device `meta`; only its reductions and steps are without numbers."""
    model = ModelConfig(path=str(folder), use_remove_padding=pack, enable_gradient_checkpointing=not stored)
    limits = MicroBatchConfig(rows=2, share_prefixes=share)
    engine: Any = FSDPEngine(model, FSDPConfig(), None, kind=kind, device=META, micro_batch=limits)
    plan = BuildPlan(model=model, kind=kind, dtype=torch.float32, temperature=0.7, trainable=True, seed=0, share_prefixes=share)
    engine.layout, engine.optimizer = SimpleNamespace(), SimpleNamespace()
    engine.root = building._root(building._prepared(plan, empty=True), plan)
    engine.reduce = lambda values, *_, **__: torch.ones(values.shape, dtype=values.dtype)
    engine.optimizer_step = lambda: StepReport(grad_norm=1.0, lr=0.1, skipped=False)
    return engine


def batch() -> dict[str, Tensor]:
    """Rows of unequal lengths, with every column that a loss can read."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (ROWS, PROMPT + RESPONSE), generator=generator)
    mask = (torch.arange(RESPONSE) < torch.tensor([5, 1, 0, 3, 2, 5])[:, None]).long()
    real = torch.cat([torch.ones(ROWS, PROMPT, dtype=torch.int64), mask], 1)
    rows = {"input_ids": ids * real, "attention_mask": real, "response_mask": mask}
    for name in ("advantages", "values", "returns", "importance_weights"):
        rows[name] = torch.randn(ROWS, RESPONSE, generator=generator)
    for name in ("old_log_probs", "ref_log_prob", "rollout_log_probs"):
        rows[name] = -torch.rand(ROWS, RESPONSE, generator=generator)
    rows["selected"] = torch.zeros(ROWS, RESPONSE, dtype=torch.uint8)
    rows["policy_version"] = torch.zeros(ROWS, RESPONSE, dtype=torch.int64)
    rows["mini_batch"] = torch.tensor([0, 0, 1, 1, 0, 1])
    return rows


def watched(engine: Any, update: Callable[[], Any]) -> int:
    """Runs an update with every micro-batch under the watch; returns the number of copies to the device.

    The watch ends before the sums of all micro-batches are read, once a step.
    """
    mode = NoHostWaits()
    sums = engine._global_sums

    def read_at_the_end(*columns: Any) -> dict[str, float]:
        mode.__exit__(None, None, None)
        try:
            found: dict[str, float] = sums(*columns)
        finally:
            mode.__enter__()
        return found

    engine._global_sums = read_at_the_end
    with mode:
        update()
    return mode.copies


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.names()))
def test_every_policy_loss(folder: Path, name: str) -> None:
    engine = engine_on_meta(folder)
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name), entropy_coeff=0.1, use_kl_loss=True)
    updater = PolicyUpdater(engine, config, scale=5.0)
    assert watched(engine, lambda: updater.update(batch(), 2, 1)) > 0


@pytest.mark.parametrize(
    "settings",
    [{"share": True}, {"stored": False}, {"stored": True}],
    ids=["shared prefixes", "recomputed", "stored"],
)
def test_every_way_to_compute_packed_rows(folder: Path, settings: dict[str, bool]) -> None:
    engine = engine_on_meta(folder, **settings)
    correction = RolloutCorrectionConfig(rollout_is="token")
    updater = PolicyUpdater(engine, ActorConfig(loss_agg_mode="seq-mean-token-mean"), scale=5.0, correction=correction)
    watched(engine, lambda: updater.update(batch(), 1, 1))


def test_a_critic(folder: Path) -> None:
    engine = engine_on_meta(folder, "value")
    updater = ValueUpdater(engine, CriticConfig(ppo_epochs=1), loss_agg_mode="token-mean", scale=5.0)
    watched(engine, lambda: updater.update(batch(), 1))


def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
    assert outputs.log_probs is not None
    return LossOutput(loss=(outputs.log_probs * micro["response_mask"]).sum())


def test_padded_rows_wait_once_a_pass_because_transformers_reads_their_mask(folder: Path) -> None:
    engine = engine_on_meta(folder, pack=False)
    with pytest.raises(HostWait, match="_local_scalar_dense"):
        watched(engine, lambda: engine.forward_backward(batch(), loss))


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: float(x.sum()),
        lambda x: bool(x.any()),
        lambda x: (x > 0).nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x.to("cpu", non_blocking=True),
        lambda x: torch.ones(3).to(x.device),
        lambda x: x.sum().item(),
    ],
)
def test_controls_each_kind_of_wait_is_found(folder: Path, wait: Callable[[Tensor], Any]) -> None:
    engine = engine_on_meta(folder)

    def waiting(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        wait(outputs.log_probs)
        return loss(outputs, micro)

    with pytest.raises(HostWait):
        watched(engine, lambda: engine.forward_backward(batch(), waiting))


def test_a_control_a_copy_that_blocks_in_the_plan_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "to_device", lambda tensor, device: tensor.to(device))
    engine = engine_on_meta(folder)
    with pytest.raises(HostWait, match="to the device blocks"):
        watched(engine, lambda: engine.forward_backward(batch(), loss))
