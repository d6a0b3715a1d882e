"""SwanLab.  Online, or with SWANLAB_MODE=offline (upload later with `swanlab sync`) or local.

The run's id is kept in the run folder, so that a resumed job continues the same run online; offline each start leaves a folder
of its own below `<run folder>/trackers/swanlab`, and all of them belong to the same id.
"""

from __future__ import annotations

import importlib
import signal
import threading
import uuid
from collections.abc import Sequence
from typing import Any, Literal

from rlhub.errors import ConfigError
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.tracker import GenerationRow, Metrics, RunInfo, Status, Tracker, load_package, one_line, sample_text

NOTE = "swanlab_run_id"
STATES: dict[Status, Literal["success", "crashed", "aborted"]] = {
    "finished": "success",
    "running": "success",
    "interrupted": "aborted",
    "failed": "crashed",
}
REMEDY = (
    "run `swanlab login` (or set SWANLAB_API_KEY), keep the run on this machine with SWANLAB_MODE=offline (`swanlab sync` "
    "uploads it later), or take swanlab out of trainer.logger"
)


def login_problems() -> list[str]:
    """Returns the problem of the account's key, found without a network."""
    swanlab = importlib.import_module("swanlab")
    try:
        settings = swanlab.Settings()
    except ValueError as error:
        return [f"trainer.logger names swanlab, whose settings are wrong ({one_line(error)}): {REMEDY}"]
    if settings.mode == "online" and settings.api_key is None:
        return [f"trainer.logger names swanlab, which has no login on this machine: {REMEDY}"]
    return []


class SwanlabTracker(Tracker):
    """Logs all metrics with the trainer's step as SwanLab's, and sample completions as a text per validation."""

    def start(self, run: RunInfo) -> None:
        self._swanlab: Any = load_package("swanlab")
        folder = RunFolder(run.folder)
        known = folder.note(NOTE) if run.resumed_step is not None else None
        run_id = known or uuid.uuid4().hex[:12]
        own = run.own_folder("swanlab")
        own.parent.mkdir(parents=True, exist_ok=True)
        on_interrupt = signal.getsignal(signal.SIGINT)
        try:
            self._run = self._swanlab.init(
                project=run.project, name=run.experiment, id=run_id, resume="allow", log_dir=str(own), config=run.config
            )
        except (RuntimeError, ValueError, OSError, self._swanlab.exceptions.AuthenticationError) as error:
            raise ConfigError(f"swanlab does not start ({one_line(error)}): {REMEDY}") from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, on_interrupt)  # its own would end its run at once, while training ends the step
        folder.write_note(NOTE, run_id)

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log({name: value for name, value in metrics.items() if not isinstance(value, str)}, step=step)

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:
        self._run.log({f"samples/{split}": self._swanlab.Text(sample_text(rows))}, step=step)

    def finish(self, status: Status, message: str = "") -> None:
        self._run.finish(state=STATES[status], error=(message or status) if status == "failed" else None)
