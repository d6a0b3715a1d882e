"""Recorder and the registry of trackers: writes what a training loop reports, and passes it on.

The recorder itself writes metrics.jsonl, the sample generations, trace.json and report.html, which every run has.  All of it
goes to the chosen trackers too.  A tracker that fails during a run is dropped with a warning, and the files do not depend on it.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlhub.errors import RlhubError
from rlhub.registry import Registry
from rlhub.tracking.generations import write_generations
from rlhub.tracking.metrics_log import MetricsLog
from rlhub.tracking.report import write_report
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.spans import SpanLog, write_trace
from rlhub.tracking.tracker import GenerationRow, Metrics, RunInfo, Status, Tracker, is_installed
from rlhub.utils.redact import redact

logger = logging.getLogger(__name__)

REPORT_EVERY_S = 30.0
REPORT_SHARE = 0.01  # largest fraction of the run's time that goes into refreshing the report

TRACKERS: Registry[type[Tracker]] = Registry("tracker")
"""Trackers by name.  `requires` names the Python packages that a tracker needs, which rlhub's extra of its name installs.  The
companion `login`, () -> list of problems, runs before a run starts: it returns what the tracker's account lacks on this machine,
or asks the user for it."""
TRACKERS.add_lazy("console", "rlhub.tracking.metrics_log:ConsoleTracker", requires=("rich",))
TRACKERS.add_lazy("mlflow", "rlhub.tracking.mlflow:MlflowTracker", requires=("mlflow",))
TRACKERS.add_lazy(
    "swanlab",
    "rlhub.tracking.swanlab:SwanlabTracker",
    requires=("swanlab",),
    companions={"login": "rlhub.tracking.swanlab:login_problems"},
)
TRACKERS.add_lazy("tensorboard", "rlhub.tracking.metrics_log:TensorboardTracker", requires=("tensorboard",))
TRACKERS.add_lazy("trackio", "rlhub.tracking.trackio:TrackioTracker", requires=("trackio",))
TRACKERS.add_lazy(
    "wandb", "rlhub.tracking.wandb:WandbTracker", requires=("wandb",), companions={"login": "rlhub.tracking.wandb:login_problems"}
)
EXTRAS = frozenset(TRACKERS.names()) - {"console"}
"""Trackers whose packages an extra of rlhub installs; the console's come with rlhub."""


class Recorder:
    """Writes a run's progress to its folder and passes it on to the trackers.  Driver process only; `folder` is open.

    A step's line and its checkpoint are two writes.  A caller either logs first and then commits, or commits first with the
    metrics in the checkpoint's state and gives them to `start` on resume.  Both ways each step is logged exactly once.

    recorder = Recorder(folder, info, ["console", "wandb"])
    recorder.start()
    recorder.log(step, metrics)                    # once per step
    recorder.log_generations(step, "val", rows)    # before that step's `log`
    recorder.finish("finished")
    """

    def __init__(self, folder: RunFolder, info: RunInfo, trackers: Sequence[str], spans: SpanLog | None = None) -> None:
        """spans: the phases and calls of the run, which are written to trace.json whenever the report is written."""
        self.folder = folder
        self.info = dataclasses.replace(info, config=redact(info.config))
        self.log_file = MetricsLog(folder.metrics)
        self._trackers: dict[str, Tracker] = {name: TRACKERS.get(name)() for name in dict.fromkeys(trackers)}
        self._spans = spans
        self._next_report = 0.0

    def start(self, resumed_metrics: Mapping[str, Any] | None = None) -> list[int]:
        """Writes config.yaml, rewinds metrics.jsonl to the step resumed from, and starts the trackers.

        Returns the steps that an earlier process logged and that will be repeated.
        resumed_metrics: the resumed step's metrics from its checkpoint, for a run that died before it could log them.
        """
        if self.info.config:
            self.folder.write_config(self.info.config)
        resumed = self.info.resumed_step
        dropped = self.log_file.rewind(-1) if resumed is None else self.log_file.resume(resumed, resumed_metrics)
        if dropped:
            logger.info("%s: dropped steps %s, they are done again", self.folder.metrics, _ranges(dropped))
        started: list[Tracker] = []
        try:
            for tracker in self._trackers.values():
                tracker.start(self.info)
                started.append(tracker)
        except RlhubError:
            for tracker in started:
                tracker.finish("failed")
            self._trackers.clear()  # `finish` follows, and is not for those that never started
            raise
        self._next_report = time.monotonic() + REPORT_EVERY_S
        return dropped

    def log(self, step: int, metrics: Metrics) -> None:
        """Writes the metrics of one finished step to disk and to the trackers; each step once, in ascending order."""
        self.log_file.append(step, metrics)
        self._tell(lambda tracker: tracker.log(step, metrics))
        self._refresh_report()

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:
        """Records sample completions of a step; split is "val" or "train"."""
        write_generations(self.folder.generations, step, split, rows)
        self._tell(lambda tracker: tracker.log_generations(step, split, rows))

    def phase(self, name: str) -> None:
        """Passes the name of the run's present phase on to the trackers."""
        self._tell(lambda tracker: tracker.phase(name))

    def finish(self, status: Status, message: str = "", *, report: bool = True) -> None:
        """Writes the final report and closes the trackers.  report: False where the run folder was removed."""
        if report:
            self._write_report(status, message)
        self._tell(lambda tracker: tracker.finish(status, message))
        self._trackers.clear()

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except (RlhubError, OSError) as error:
                logger.warning("tracker %s failed and gets nothing more of this run: %s", name, error)
                del self._trackers[name]

    def _refresh_report(self) -> None:
        start = time.monotonic()
        if start < self._next_report:
            return
        self._write_report("running")
        end = time.monotonic()
        self._next_report = end + max(REPORT_EVERY_S, (end - start) / REPORT_SHARE)

    def _write_report(self, status: Status, message: str = "") -> None:
        if self._spans is not None and (spans := self._spans.latest()):
            write_trace(self.folder.trace, spans)
        write_report(self.folder, self.info, status, message)


def _ranges(steps: Sequence[int]) -> str:
    ordered = sorted(steps)
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def package_problems(names: Iterable[str]) -> list[str]:
    """Returns the packages of the named trackers that are not installed, with the command that installs rlhub's extras."""
    found = []
    for name in dict.fromkeys(name for name in names if name in TRACKERS):
        missing = [package for package in sorted(TRACKERS.row(name).requires) if not is_installed(package)]
        advice = f"; run: pip install 'rlhub[{name}]'" if name in EXTRAS else ""
        if missing:
            found.append(f"trainer.logger: {name} needs the package {', '.join(missing)}, which is not installed{advice}")
    return found


def login_problems(names: Iterable[str]) -> list[str]:
    """Returns the problems of the named trackers' accounts on this machine."""
    logins = [TRACKERS.companion(name, "login") for name in dict.fromkeys(names)]
    return [problem for login in logins if login is not None for problem in login()]
