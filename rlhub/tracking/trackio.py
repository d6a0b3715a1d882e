"""Trackio: a local database with a dashboard, or a Hugging Face Space (TRACKIO_SPACE_ID), or a server (TRACKIO_SERVER_URL).

    TRACKIO_DIR=<run folder>/trackers/trackio trackio show

The database is the run's own unless TRACKIO_DIR names one, which several runs may share.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rlhub.errors import ConfigError
from rlhub.tracking.tracker import GenerationRow, Metrics, RunInfo, Status, Tracker, load_package, one_line, sample_table


class TrackioTracker(Tracker):
    """Logs all metrics with the trainer's step as Trackio's, and sample completions as a table per validation.

    A resumed job continues the newest run of its project and name.
    """

    def start(self, run: RunInfo) -> None:
        # the package reads its folder from the environment when it is imported, and there is no other way to tell it
        os.environ.setdefault("TRACKIO_DIR", str(run.own_folder("trackio")))
        self._trackio: Any = load_package("trackio")
        resume = "never" if run.resumed_step is None else "allow"
        try:
            self._run = self._trackio.init(
                project=run.project, name=run.experiment, resume=resume, config=run.config, embed=False
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise ConfigError(
                f"trackio does not start ({one_line(error)}): check TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL, or "
                "take trackio out of trainer.logger"
            ) from error

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(dict(metrics), step=step)

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:
        columns, cells = sample_table(step, rows)
        self._run.log({f"samples/{split}": self._trackio.Table(columns=columns, data=cells)}, step=step)

    def finish(self, status: Status, message: str = "") -> None:
        self._trackio.finish()
