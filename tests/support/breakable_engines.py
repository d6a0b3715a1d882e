"""Imported into a process before it builds an engine: a step of the hf engine fails while a file beside its model says how, and
no other engine is built."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhub.engines.rollout.continuous_batching import TokenEvent
from rlhub.engines.rollout.hf.engine import ContinuousBatch, HFEngine

FILE = "broken"
LIMIT_S = 240.0


def broken(model: Path) -> Path:
    """The file for engines of this model."""
    return model.with_name(FILE)


def _step(stepper: ContinuousBatch, step: Any = ContinuousBatch.step) -> Sequence[TokenEvent]:
    if (file := broken(Path(stepper._model.config._name_or_path))).exists():
        raise RuntimeError(file.read_text())
    events: Sequence[TokenEvent] = step(stepper)
    return events


def _initialize(engine: HFEngine, initialize: Any = HFEngine.initialize) -> None:
    deadline = time.monotonic() + LIMIT_S
    while broken(Path(str(engine._setup.model.path))).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    initialize(engine)


assert HFEngine._make_stepper, "the steps are its own"
HFEngine.initialize = _initialize  # type: ignore[method-assign]
ContinuousBatch.step = _step  # type: ignore[method-assign]
