"""MLflow, on the server of MLFLOW_TRACKING_URI, else in a SQLite database below the run folder.

    mlflow ui --backend-store-uri sqlite:///<run folder>/trackers/mlflow/mlflow.db

trainer.project_name is the MLflow experiment, trainer.experiment_name the run's name.  The run's id is kept in the run folder,
so a resumed job continues the same run instead of opening a second one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from rlhub.errors import ConfigError, RlhubError
from rlhub.tracking.run_folder import RunFolder, leaves
from rlhub.tracking.tracker import GenerationRow, Metrics, RunInfo, Status, Tracker, load_package, one_line, sample_table

T = TypeVar("T")

NOTE = "mlflow_run_id"
STATUS: dict[Status, str] = {"finished": "FINISHED", "running": "RUNNING", "interrupted": "KILLED", "failed": "FAILED"}
MOST_METRICS, MOST_PARAMS = 1000, 100
"""Entries of one request (mlflow.utils.validation, MAX_METRICS_PER_BATCH and MAX_PARAMS_TAGS_PER_BATCH)."""
LONGEST_KEY, LONGEST_PARAM = 250, 6000
"""Characters (mlflow.utils.validation, MAX_ENTITY_KEY_LENGTH and MAX_PARAM_VAL_LENGTH)."""


class MlflowTracker(Tracker):
    """Logs all metrics with the trainer's step as MLflow's, the settings as parameters, and sample completions as artifacts."""

    def start(self, run: RunInfo) -> None:
        self._mlflow = load_package("mlflow")
        folder = RunFolder(run.folder)
        try:
            self._client = self._mlflow.MlflowClient(tracking_uri=self._tracking_uri(run))
            self._run_id = folder.note(NOTE) if run.resumed_step is not None else None
            if self._run_id is None:
                self._run_id = self._create_run(run)
            else:
                self._client.update_run(self._run_id, status="RUNNING")
        except (self._mlflow.exceptions.MlflowException, OSError) as error:
            raise ConfigError(
                f"mlflow does not start ({one_line(error)}): check MLFLOW_TRACKING_URI, unset it to keep the run on this "
                "machine (pip install 'rlhub[mlflow]' has all that takes), or take mlflow out of trainer.logger"
            ) from error
        folder.write_note(NOTE, self._run_id)

    def _tracking_uri(self, run: RunInfo) -> str | None:
        """Returns the URI of the database below the run folder, or None where the user has set a URI, which the client finds."""
        if self._mlflow.is_tracking_uri_set():
            return None
        own = run.own_folder("mlflow")
        own.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{own / 'mlflow.db'}"

    def _create_run(self, run: RunInfo) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:  # artifacts of a database on this machine lie beside it; a server has a place of its own
            local = not self._mlflow.is_tracking_uri_set()
            place = (run.own_folder("mlflow") / "artifacts").as_uri() if local else None
            experiment_id = self._client.create_experiment(run.project, artifact_location=place)
        run_id: str = self._client.create_run(experiment_id, run_name=run.experiment).info.run_id
        settings = {key(name): str(value)[:LONGEST_PARAM] for name, value in leaves(run.config)}
        params = [self._mlflow.entities.Param(name, value) for name, value in settings.items()]
        for some in pieces(params, MOST_PARAMS):
            self._client.log_batch(run_id, params=some)
        return run_id

    def log(self, step: int, metrics: Metrics) -> None:
        now, numbers = int(time.time() * 1000), numbers_of(metrics)
        entries = [self._mlflow.entities.Metric(name, value, now, step) for name, value in numbers.items()]
        for some in pieces(entries, MOST_METRICS):
            self._guarded(partial(self._client.log_batch, self._run_id, metrics=some))

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:
        columns, cells = sample_table(step, rows)
        file = f"samples/{split}-{step:06d}.json"
        self._guarded(lambda: self._client.log_dict(self._run_id, {"columns": columns, "data": cells}, file))

    def finish(self, status: Status, message: str = "") -> None:
        self._guarded(lambda: self._client.set_terminated(self._run_id, status=STATUS[status]))
        if message:
            self._guarded(lambda: self._client.set_tag(self._run_id, "message", message[:LONGEST_PARAM]))

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except self._mlflow.exceptions.MlflowException as error:
            raise RlhubError(f"mlflow: {one_line(error)}") from error


def key(name: str) -> str:
    """Returns the metric's name in MLflow: `val/pass_at_1` for `val/pass@1`, as other trainers write it, with single slashes, and
    with `_` for other characters that MLflow refuses."""
    return re.sub(r"[^/\w.\- :]", "_", re.sub(r"/+", "/", name.replace("@", "_at_")), flags=re.ASCII)[:LONGEST_KEY]


def numbers_of(metrics: Mapping[str, float | int | str]) -> dict[str, float]:
    """Returns the metrics that are numbers, by their names in MLflow."""
    return {key(name): float(value) for name, value in metrics.items() if not isinstance(value, str)}


def pieces(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yields the items in order, at most `size` at a time."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
