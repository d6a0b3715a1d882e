"""Imported into a process before it builds an engine: a step of the hf engine fails while a file beside its model says how."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhub.engines.rollout.continuous_batching import TokenEvent
from rlhub.engines.rollout.hf.engine import ContinuousBatch, HFEngine

FILE = "broken"


def broken(model: Path) -> Path:
    """The file for engines of this model."""
    return model.with_name(FILE)


def _step(stepper: ContinuousBatch, step: Any = ContinuousBatch.step) -> Sequence[TokenEvent]:
    if (file := broken(Path(stepper._model.config._name_or_path))).exists():
        raise RuntimeError(file.read_text())
    events: Sequence[TokenEvent] = step(stepper)
    return events


assert HFEngine._make_stepper, "the steps are its own"
ContinuousBatch.step = _step  # type: ignore[method-assign]
