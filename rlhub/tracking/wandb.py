"""Weights & Biases.  Online, or offline with WANDB_MODE=offline (upload later with `wandb sync`).

The run's id is kept in the run folder, so a resumed job continues the same run instead of opening a second one.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from rlhub.errors import ConfigError, RlhubError
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.tracker import GenerationRow, Metrics, RunInfo, Status, Tracker, load_package, one_line, sample_table

NOTE = "wandb_run_id"
EXIT_CODES: dict[Status, int] = {"finished": 0, "running": 0, "interrupted": 1, "failed": 1}
WITHOUT_LOGIN = ("offline", "disabled", "dryrun")
"""Values of WANDB_MODE that need no account."""
REMEDY = (
    "run `wandb login` (or set WANDB_API_KEY), keep the run on this machine with WANDB_MODE=offline (`wandb sync` uploads it "
    "later), or take wandb out of trainer.logger"
)


def login_problems() -> list[str]:
    """Returns the problem of the account's key, found without a network; at a terminal wandb asks for a missing key."""
    wandb = importlib.import_module("wandb")
    try:
        if wandb.setup().settings.mode not in WITHOUT_LOGIN:
            wandb.login(verify=False)
    except (wandb.Error, ValueError, OSError) as error:
        return [f"trainer.logger names wandb, which has no login on this machine ({one_line(error)}): {REMEDY}"]
    return []


class WandbTracker(Tracker):
    """Logs all metrics with the trainer's step as wandb's, and sample completions as a table per validation."""

    def start(self, run: RunInfo) -> None:
        self._wandb: Any = load_package("wandb")
        folder = RunFolder(run.folder)
        known = folder.note(NOTE) if run.resumed_step is not None else None
        run_id = known or uuid.uuid4().hex[:12]
        try:
            self._run = self._wandb.init(
                project=run.project, name=run.experiment, id=run_id, resume="allow", dir=str(run.folder), config=run.config
            )
        except (self._wandb.Error, OSError) as error:
            raise ConfigError(f"wandb does not start ({one_line(error)}): {REMEDY}") from error
        folder.write_note(NOTE, run_id)

    def log(self, step: int, metrics: Metrics) -> None:
        self._guarded(lambda: self._run.log(dict(metrics), step=step))

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:
        columns, cells = sample_table(step, rows)
        self._guarded(lambda: self._run.log({f"samples/{split}": self._wandb.Table(columns=columns, data=cells)}, step=step))

    def finish(self, status: Status, message: str = "") -> None:
        self._guarded(lambda: self._run.finish(exit_code=EXIT_CODES[status]))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except self._wandb.Error as error:
            raise RlhubError(f"wandb: {error}") from error
