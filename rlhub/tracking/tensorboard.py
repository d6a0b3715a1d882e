"""TensorBoard event files below `<run folder>/tensorboard`; look at them with `tensorboard --logdir <run folder>`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from rlhub.errors import ConfigError
from rlhub.tracking.tracker import GenerationRow, Metrics, RunInfo, Status, Tracker

SHOWN_SAMPLES = 8


class TensorboardTracker(Tracker):
    """Scalars under their own names.  A resumed run tells TensorBoard to forget the steps that are done again."""

    def start(self, run: RunInfo) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigError("trainer.logger names tensorboard, which is not installed; run: pip install 'rlhub[tracking]'")
        from torch.utils.tensorboard import SummaryWriter

        purge = None if run.resumed_step is None else run.resumed_step + 1
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:
        parts = [f"**{row.prompt}**\n\n{row.response}\n\nscore: {row.score}" for row in rows[:SHOWN_SAMPLES]]
        self._writer.add_text(f"samples/{split}", "\n\n---\n\n".join(parts), step)

    def finish(self, status: Status, message: str = "") -> None:
        self._writer.add_text("status", f"{status} {message}".strip())
        self._writer.close()
