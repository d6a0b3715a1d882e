"""A limit on training steps in a row that change nothing: their loss or gradient was not finite, and they were skipped.

One such step is chance; several on end come from a setting or a model with which no step will ever be taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhub.errors import NonFiniteError

MODELS = ("actor", "critic", "train")
"""What the metrics of models that are trained begin with."""


@dataclass(slots=True)
class SkippedSteps:
    """limit: training steps; None: there is none."""

    limit: int | None
    _in_a_row: dict[str, int] = field(init=False, default_factory=dict)

    def add(self, metrics: Mapping[str, float | str]) -> bool:
        """Count a training step; whether a model has had as many in a row as the limit."""
        for model in MODELS:
            skipped = float(metrics.get(f"{model}/skipped_steps", 0.0))
            taken = float(metrics.get(f"{model}/optimizer_steps", 1.0 - skipped))
            self._in_a_row[model] = self._in_a_row.get(model, 0) + 1 if skipped and taken <= 0 else 0
        return self.limit is not None and max(self._in_a_row.values()) >= self.limit

    def error(self, step: int, folder: object) -> NonFiniteError:
        """What to raise when `add` was True and the step is saved."""
        model = max(self._in_a_row, key=self._in_a_row.__getitem__)
        return NonFiniteError(
            f"{self._in_a_row[model]} training steps in a row were skipped, because loss or gradient was not finite "
            f"({model}/skipped_steps), so the model does not change any more. Step {step} is saved as it is in {folder}. Look "
            "for a coefficient, a learning rate or rewards out of all bounds; trainer.max_skipped_steps is the limit"
        )
