"""Run: everything around the training steps that is the same for every trainer.

It holds the run folder and its lock, resuming, metrics, progress, checkpoints with retention, the limit on skipped steps, and
stopping on signals.  A step ends in this order: the checkpoint is committed with the step's metrics inside, then its line is
written to metrics.jsonl.  A process killed between the two writes the line on resume, so that each step has exactly one line.
"""

from __future__ import annotations

import errno
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

from rlhub.checkpoint.files import FileEntry
from rlhub.checkpoint.store import Checkpoint, CheckpointStore
from rlhub.config.rules.faults import planned_faults
from rlhub.config.rules.placement import pools_of
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.errors import CheckpointError, NonFiniteError, RunFolderError
from rlhub.tracking.metrics_log import MetricsLog
from rlhub.tracking.recorder import Recorder
from rlhub.tracking.report import write_report
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.spans import STEPS, CallTiming, SpanLog
from rlhub.tracking.tracker import GenerationRow, Metrics, RunInfo, Status
from rlhub.utils import faults
from rlhub.utils.atomic import write_text
from rlhub.utils.faults import FaultPlan
from rlhub.utils.timing import PhaseTimer

logger = logging.getLogger(__name__)

TRAINED_MODELS = ("actor", "critic", "train")
"""Prefixes of the metrics of models that are trained."""
SHOWN_CHANGES = 8
"""A message names at most so many changed settings."""
SaveFunction = Callable[[Path], list[FileEntry]]
"""Saves the models below a checkpoint's folder, and returns the files."""
StateFunction = Callable[[], Mapping[str, Any]]
"""Returns the driver's state for a checkpoint, JSON-able."""


class LateMetrics(Protocol):
    """Metrics of a step that are still being measured while the next steps run."""

    def done(self) -> bool:
        """Returns True when `result` does not block."""
        ...

    def result(self) -> Metrics:
        """Blocks until the metrics are measured, and returns them; the thread that trains calls it once."""
        ...


class Run:
    """The context manager around a job's training steps: `with Run(...) as run`.

    resolved: the whole configuration as plain values.  record: goes into the state of every checkpoint.  check: is called with
    the checkpoint to resume from, and raises where the run cannot resume from it.
    Attributes: `calls` is the CallObserver that times worker calls and counts what they carry; `spans` records when each phase
    and call ran.
    """

    def __init__(
        self,
        config: TrainerConfig,
        resolved: dict[str, Any],
        total_steps: int,
        *,
        record: Mapping[str, Any] | None = None,
        check: Callable[[Checkpoint], None] | None = None,
    ) -> None:
        self.config, self.resolved, self.total_steps = config, resolved, total_steps
        self._record, self._check = dict(record or {}), check
        self.folder = RunFolder(Path(config.default_local_dir))
        self.store = CheckpointStore(self.folder.path)
        self.spans = SpanLog()
        self.timers = PhaseTimer(self.spans.block)
        self.calls = CallTiming(self.timers, self._show_phase, self.spans.record)
        self.signals = StopSignals()
        self.checkpoint: Checkpoint | None = None
        self.recorder: Recorder | None = None
        self._step_started = time.perf_counter()
        self._lines: deque[_Line] = deque()
        self._skipped = SkippedSteps(config.max_skipped_steps)

    def __enter__(self) -> Run:
        self.folder.open()
        self._plan_faults()
        self.signals.__enter__()
        try:
            self._close_abandoned_report()
            self.checkpoint = self._find_checkpoint()
            if self.checkpoint is not None and self._check is not None:
                self._check(self.checkpoint)
            self._warn_of_changes()
            self._complete_log()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _close_abandoned_report(self) -> None:
        """Corrects the report of a process that was killed, which still says "running", even if this start fails too."""
        if self.folder.abandoned_by is not None and self.folder.report.is_file():
            ended = (
                f"the process that wrote this ({self.folder.abandoned_by}) ended without a word, as after kill -9 or a power loss"
            )
            write_report(self.folder, self._info(), "failed", ended)

    def _plan_faults(self) -> None:
        """Installs the run's fault plan, and warns, so that nobody leaves one in by accident."""
        if planned := planned_faults(self.config):
            logger.warning("trainer.faults: this run is made to fail: %s", "; ".join(map(str, planned)))
            faults.install(FaultPlan(faults=planned, record=str(self.folder.logs)))

    def _forget_faults(self) -> None:
        """Removes the fault plan from this process, and logs the faults whose place was never passed."""
        if (plan := faults.installed()) is not None and (left := list(plan.unstruck())):
            logger.warning("trainer.faults: not struck, because no such place was passed: %s", "; ".join(map(str, left)))
        faults.install(None)

    def _find_checkpoint(self) -> Checkpoint | None:
        """Returns the checkpoint to resume from, or None.  Raises CheckpointError where the folder has damaged ones only."""
        mode = self.config.resume_mode
        if mode == "disable":
            if aside := self.folder.set_aside():
                logger.warning("trainer.resume_mode=disable: the earlier run here was moved to %s", aside)
            return None
        if mode == "resume_path":
            return self.store.open(Path(self.config.resume_from_path or ""))
        if (newest := self.store.latest()) is None and (damaged := self.store.candidates()):
            names = ", ".join(sorted(path.name for path in damaged))
            raise CheckpointError(
                f"{self.folder.path} has no whole checkpoint, only {names} (the warnings above say what is wrong with each), and "
                "training from the beginning would overwrite that run: restore one of them, or start anew with "
                "trainer.resume_mode=disable (the old run is moved aside)"
            )
        return newest

    def _warn_of_changes(self) -> None:
        """Warns where the folder's run has other settings: it may be another experiment's, which this start would continue."""
        if self.checkpoint is None or not (changes := self.folder.changes(self.resolved)):
            return
        more = f" and {len(changes) - SHOWN_CHANGES} more" if len(changes) > SHOWN_CHANGES else ""
        logger.warning(
            "%s holds a run with other settings (%s%s). It is this run that goes on; for a new one set trainer.experiment_name "
            "or trainer.default_local_dir to another name, or trainer.resume_mode=disable",
            self.folder.path,
            "; ".join(changes[:SHOWN_CHANGES]),
            more,
        )

    def _complete_log(self) -> None:
        """Writes the last line and the report of a finished run that was killed between its last checkpoint and that line."""
        done = self.checkpoint
        if done is None or not self.already_finished or done.path.parent != self.folder.path:
            return
        if MetricsLog(self.folder.metrics).last_step < done.step:
            self._start_recorder(trackers=[])

    @property
    def already_finished(self) -> str | None:
        """The message for the user when no step is left to train, else None."""
        if self.checkpoint is None or self.checkpoint.step < self.total_steps:
            return None
        return (
            f"this run already finished: {self.checkpoint.path} holds step {self.checkpoint.step} of {self.total_steps}. "
            "To train longer raise trainer.total_training_steps or trainer.total_epochs; to start anew set "
            "trainer.resume_mode=disable (the old run is moved aside) or another trainer.experiment_name."
        )

    def start(self) -> None:
        """Opens metrics and trackers; it is called once the workers are up."""
        repeated = self._start_recorder(self.config.logger)
        if self.folder.report.is_file():  # it still says how the earlier start ended
            write_report(self.folder, self._info(), "running")
        if resumed := self.checkpoint:
            again = f"; steps {repeated} are done again" if repeated else ""
            logger.warning(
                "resuming from %s: continuing at step %d of %d%s", resumed.path, resumed.step + 1, self.total_steps, again
            )

    def _start_recorder(self, trackers: Sequence[str]) -> list[int]:
        """Opens the recorder, and returns the steps that were logged before and will be repeated."""
        self.recorder = Recorder(self.folder, self._info(), trackers, self.spans)
        return self.recorder.start(self.checkpoint.state["metrics"] if self.checkpoint else None)

    def _info(self) -> RunInfo:
        return RunInfo(
            project=self.config.project_name,
            experiment=self.config.experiment_name,
            folder=self.folder.path,
            config=self.resolved,
            total_steps=self.total_steps,
            resumed_step=self.checkpoint.step if self.checkpoint else None,
        )

    @property
    def stop_requested(self) -> bool:
        """True when a signal has asked the run to stop after the present step."""
        return self.signals.requested

    def due(self, frequency: int, step: int, *, last: bool) -> bool:
        """Returns True every `frequency` steps and at the last one; always False when frequency is not positive."""
        return frequency > 0 and (step % frequency == 0 or last)

    def begin_step(self, step: int) -> None:
        """Starts the step's clock.  Raises RunFolderError when the run folder was removed.

        From the first update on, a stop signal waits for the end of the step, so that the step is saved.
        """
        self.folder.check()
        if step > 0:
            self.signals.defer()
        faults.begin_step(step)
        faults.at("driver.step")
        self.timers.drain()
        self.calls.reset_traffic()
        self._step_started = time.perf_counter()

    def end_step(
        self,
        step: int,
        metrics: Metrics,
        *,
        save: SaveFunction,
        state: StateFunction,
        last: bool,
        late: LateMetrics | None = None,
    ) -> None:
        """Saves the step if that is due, then logs it.  The last step is always saved, so that a run leaves its model.

        Raises NonFiniteError after both where the limit on skipped steps is reached.
        late: metrics for which the step's line, the next lines and the save wait, since a checkpoint holds the step's metrics.
        """
        self.folder.check()  # nothing may be created at the path of a folder that was removed
        self._record_span(step)
        line = _Line(step, {**metrics, **self._timings(metrics)}, late)
        stuck = self._skipped.add(metrics)
        if last or stuck or self.due(self.config.save_freq, step, last=last):
            self._write_lines(wait=True)
            line.complete()
            with self.timers.measure("save"):
                self._save(step, line.metrics, save, state)
            faults.at("driver.log")
            line.metrics = {**line.metrics, **self.timers.drain(), **self.calls.traffic()}
        self._lines.append(line)
        self._write_lines(wait=False)
        if stuck:
            raise self._skipped.error(step, self.store.folder(step))

    def _write_lines(self, *, wait: bool) -> None:
        """Logs the complete lines in order.  wait: blocks until all lines are complete."""
        assert self.recorder is not None
        while self._lines and (wait or self._lines[0].late is None or self._lines[0].late.done()):
            self._lines[0].complete()
            line = self._lines.popleft()
            self.recorder.log(line.step, line.metrics)

    def _record_span(self, step: int) -> None:
        self.spans.record(STEPS, f"step {step}", self._step_started, time.perf_counter())

    def _timings(self, metrics: Metrics) -> dict[str, float]:
        """Returns timing_s/... of the phases and of the whole step, the traffic through the driver, and perf/throughput.

        Throughput is in tokens per second and device; the devices are the ranks of all pools.
        """
        seconds = time.perf_counter() - self._step_started
        timings = {**self.timers.drain(), "timing_s/step": seconds, "perf/time_per_step": seconds, **self.calls.traffic()}
        if "perf/total_num_tokens" in metrics:
            num_devices = sum(pool.ranks for pool in pools_of(self.config).values())
            timings["perf/throughput"] = float(metrics["perf/total_num_tokens"]) / (seconds * num_devices)
        return timings

    def _save(self, step: int, logged: Metrics, save: SaveFunction, state: StateFunction) -> None:
        """Commits the step's checkpoint and deletes those that retention does not keep."""
        numbers = {name: float(value) for name, value in logged.items() if not isinstance(value, str)}
        entries = save(self.store.begin(step))  # raises where a weight is not finite
        faults.at("driver.commit")
        self.store.commit(step, entries, {**state(), **self._record, "metrics": dict(logged)}, metrics=numbers, finite=True)
        self.store.retain(self.config.max_actor_ckpt_to_keep, self.config.keep_best)

    def log(self, step: int, metrics: Metrics) -> None:
        """Logs the metrics and timings of a step without an update (step 0)."""
        assert self.recorder is not None
        self._record_span(step)
        self.recorder.log(step, {**metrics, **self._timings(metrics)})

    def write_graph(self, picture: str) -> None:
        """Writes the picture of a step that is a graph, which the report shows."""
        write_text(self.folder.graph, picture)

    def log_generations(self, step: int, rows: Sequence[GenerationRow], split: str = "val") -> None:
        """Logs sample completions for people to read."""
        assert self.recorder is not None
        if rows:
            self.recorder.log_generations(step, split, rows)

    def _show_phase(self, name: str) -> None:
        if self.recorder is not None:
            self.recorder.phase(name)

    def finish(self, status: Status, message: str = "") -> None:
        """Writes the final report and closes the trackers."""
        if self.recorder is not None:
            self._lines.clear()  # left by a run that failed; they are logged again after it resumes from its checkpoint
            self.recorder.finish(status, message, report=self._folder_problem() is None)
            self.recorder = None

    def _folder_problem(self) -> RunFolderError | None:
        try:
            self.folder.check()
        except RunFolderError as error:
            return error
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        gone, failed = self._folder_problem(), error
        try:
            if kind is None:
                self.finish("interrupted" if self.stop_requested else "finished")
            else:
                interrupted = issubclass(kind, KeyboardInterrupt | SystemExit)
                self.finish("interrupted" if interrupted else "failed", str(error))
        except OSError as unwritten:
            failed = failed or unwritten
        finally:
            self.signals.__exit__(None, None, None)
            self._forget_faults()
            self.folder.close()
        if failed is None or isinstance(failed, OSError):
            if problem := gone or _disk_full(self.folder.path, failed):
                raise problem from failed
            if failed is not None and failed is not error:
                raise failed


def _disk_full(folder: Path, error: OSError | None) -> RunFolderError | None:
    """Returns the error for the user where the given one says that the disk is full, else None."""
    if error is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    return RunFolderError(
        f"{folder}: the disk is full ({error}); make room and start the run again: it goes on from its last checkpoint"
    )


@dataclass(slots=True)
class _Line:
    """A step's line of metrics, which waits for the step's late metrics and for the lines before it."""

    step: int
    metrics: Metrics
    late: LateMetrics | None

    def complete(self) -> None:
        """Adds the late metrics, and blocks until they are measured."""
        if self.late is not None:
            self.metrics, self.late = {**self.metrics, **self.late.result()}, None


@dataclass(slots=True)
class SkippedSteps:
    """Counts training steps in a row that were skipped because their loss or gradient was not finite.

    One such step is chance; several in a row come from a setting or a model with which no step will ever be taken.
    limit: training steps; None: there is no limit.
    """

    limit: int | None
    _in_a_row: dict[str, int] = field(init=False, default_factory=dict)

    def add(self, metrics: Mapping[str, float | str]) -> bool:
        """Counts a training step, and returns True when a model has had as many skipped steps in a row as the limit."""
        for model in TRAINED_MODELS:
            skipped = float(metrics.get(f"{model}/skipped_steps", 0.0))
            taken = float(metrics.get(f"{model}/optimizer_steps", 1.0 - skipped))
            self._in_a_row[model] = self._in_a_row.get(model, 0) + 1 if skipped and taken <= 0 else 0
        return self.limit is not None and max(self._in_a_row.values()) >= self.limit

    def error(self, step: int, folder: object) -> NonFiniteError:
        """Returns the error to raise when `add` returned True and the step is saved."""
        model = max(self._in_a_row, key=self._in_a_row.__getitem__)
        return NonFiniteError(
            f"{self._in_a_row[model]} training steps in a row were skipped, because loss or gradient was not finite "
            f"({model}/skipped_steps), so the model does not change any more. Step {step} is saved as it is in {folder}. Look "
            "for a coefficient, a learning rate or rewards out of all bounds; trainer.max_skipped_steps is the limit"
        )


class StopSignals:
    """Context manager that turns the first SIGINT or SIGTERM after `defer` into `requested`, so that the loop can save and stop.

    Before `defer`, while models are built and there is nothing to save, SIGINT raises KeyboardInterrupt and SIGTERM raises
    SystemExit.  A SIGINT after the first signal always raises KeyboardInterrupt.  The former handlers are restored on exit.
    Outside the main thread, where Python allows no handlers, it does nothing.  received: the first signal; None: none has come.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._deferring = False
        self._former: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """True when a signal has come."""
        return self.received is not None

    def defer(self) -> None:
        """Makes signals set `requested` from now on, instead of ending the process."""
        self._deferring = True

    @property
    def exit_code(self) -> int:
        """The status with which the process should exit: 128 + the signal's number, or 0 when none came."""
        return 0 if self.received is None else 128 + self.received.value

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._former[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)
        if not self._deferring:
            logger.warning("%s: stopping at once, there is nothing to save yet", self.received.name)
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(self.exit_code)
        logger.warning("%s: stopping after this step; Ctrl-C again stops at once", self.received.name)
