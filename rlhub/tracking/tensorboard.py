"""TensorBoard event files below `<run folder>/tensorboard`; look at them with `tensorboard --logdir <run folder>`."""

from __future__ import annotations

from collections.abc import Sequence

from rlhub.tracking.tracker import GenerationRow, Metrics, RunInfo, Status, Tracker, load_package, sample_text


class TensorboardTracker(Tracker):
    """Writes scalars under their own names.  A resumed run tells TensorBoard to forget the steps that are done again."""

    def start(self, run: RunInfo) -> None:
        load_package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter  # torch is loaded by those who want it alone

        purge = None if run.resumed_step is None else run.resumed_step + 1
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if not isinstance(value, str):
                self._writer.add_scalar(name, float(value), step)
        self._writer.flush()

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:
        self._writer.add_text(f"samples/{split}", sample_text(rows), step)

    def finish(self, status: Status, message: str = "") -> None:
        self._writer.add_text("status", f"{status} {message}".strip())
        self._writer.close()
