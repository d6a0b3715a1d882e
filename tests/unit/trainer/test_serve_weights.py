"""A server that is given weights of another model goes on with its own; one whose writing failed says that it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rlhub.engines.rollout.base import WeightBucket
from rlhub.errors import EngineError
from rlhub.protocol.weights.pieces import Piece, whole_piece
from rlhub.trainer.serve import EngineAdministration

WEIGHTS = {"embed": torch.zeros(4, 2), "norm": torch.zeros(2)}


class Engine:
    """Holds weights and says what was done to it.  fails: raised when half of them are written."""

    def __init__(self) -> None:
        self.version, self.load, self.done, self.fails = 0, 0, list[str](), list[Exception]()

    def live_weights(self) -> Iterable[Piece]:
        return (whole_piece(name, tensor) for name, tensor in WEIGHTS.items())

    def pause(self) -> None:
        self.done.append("pause")

    def resume(self, *, recompute: bool) -> None:
        self.done.append("resume")

    def update_weights(self, buckets: Iterable[WeightBucket], version: int) -> None:
        if self.fails:
            raise self.fails.pop()
        self.done += sorted(name for bucket in buckets for name, _ in bucket)
        self.version = version


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def reload(engine: Engine, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    admin = EngineAdministration(engine, recompute=False, bucket_bytes=1 << 20)  # type: ignore[arg-type]

    def run(weights: dict[str, torch.Tensor], version: int = 3) -> dict[str, Any]:
        save_file(weights, tmp_path / "model.safetensors")
        return asyncio.run(admin.reload(str(tmp_path), version))

    run.status = lambda: asyncio.run(admin.status())  # type: ignore[attr-defined]
    return run


def test_weights_that_fit(engine: Engine, reload: Any) -> None:
    """A tied head that the folder names besides is passed over."""
    assert reload(WEIGHTS | {"lm_head.weight": torch.zeros(4, 2)}) == {"version": 3, "load": 0, "paused": False}
    assert engine.done == ["pause", "embed", "norm", "resume"]


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (WEIGHTS | {"embed": torch.zeros(4, 3)}, r"embed has shape \(4, 3\), and \(4, 2\) in the engine"),
        (WEIGHTS | {"deeper": torch.zeros(1)}, "names the engine does not have: deeper"),
        ({"embed": WEIGHTS["embed"]}, "without 1 weights: norm"),
    ],
)
def test_another_models_weights_change_nothing(engine: Engine, reload: Any, weights: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(EngineError, match=f"another model's, and nothing was changed: .*{said}"):
        reload(weights)
    assert engine.done == [] and reload.status() == {"version": 0, "load": 0, "paused": False}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_change_nothing(engine: Engine, reload: Any, value: float) -> None:
    with pytest.raises(EngineError, match="are not finite, and nothing was changed: norm"):
        reload(WEIGHTS | {"norm": torch.tensor([1.0, value])})
    assert engine.done == [] and reload.status() == {"version": 0, "load": 0, "paused": False}


def test_half_written_weights_are_not_served_and_whole_ones_end_that(engine: Engine, reload: Any) -> None:
    engine.fails.append(EngineError("the device is lost"))
    with pytest.raises(EngineError, match="the device is lost"):
        reload(WEIGHTS)
    assert engine.done == ["pause"] and reload.status()["paused"]
    assert not reload(WEIGHTS)["paused"]
    assert engine.done[-1] == "resume"
