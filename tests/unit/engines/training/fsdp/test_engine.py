"""Passes on a device that is not the rows': they are planned where the rows lie, and only what the pass computes with moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhub.config.sections.training import FSDPConfig, ModelConfig
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from rlhub.engines.training.packing import ModelInputs

META = torch.device("meta")
"""Stands for a GPU: no number can be read from it, and it does not compute with tensors of the CPU."""


class FakeRoot(nn.Module):
    """Numbers per target without a model; notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), device=META))
        self.seen: list[ModelInputs] = []

    def forward(self, inputs: ModelInputs, wanted: frozenset[str]) -> dict[str, Tensor]:
        self.seen.append(inputs)
        return {"log_probs": self.weight * inputs.targets}


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("learned", [1, 0], ids=["tokens to learn from", "nothing to learn from"])
def test_rows_on_the_host_train_on_another_device(pack: bool, learned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = FSDPEngine(
        ModelConfig(use_remove_padding=pack),
        FSDPConfig(),
        None,
        kind="policy",
        device=META,
        micro_batch=MicroBatchConfig(rows=2),
    )
    engine.layout, engine.optimizer, engine.root = SimpleNamespace(), SimpleNamespace(), FakeRoot()
    monkeypatch.setattr(engine, "reduce", lambda totals, *_, **__: torch.zeros(totals.shape))
    rows = {
        "input_ids": torch.tensor([[10, 11, 12], [0, 20, 21], [30, 31, 32]]),
        "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1], [1, 1, 1]]),
        "response_mask": torch.tensor([[1, 1], [0, 1], [1, 0]]) * learned,
    }
    moved: list[Rows] = []

    def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
        moved.append(micro)
        assert outputs.log_probs is not None
        return LossOutput(loss=(outputs.log_probs * micro["response_mask"]).sum())

    engine.forward_backward(rows, loss)
    assert [inputs.shape for inputs in engine.root.seen] == [(2, 2), (1, 2)]
    assert all(column.is_meta for micro in moved for column in micro.values())
    assert all(inputs.input_ids.is_meta and inputs.sources.is_meta and inputs.slots.is_meta for inputs in engine.root.seen)
    assert all((inputs.plan is not None) == pack for inputs in engine.root.seen)
