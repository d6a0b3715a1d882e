"""Stand-ins of the packages behind mlflow.py, swanlab.py and trackio.py: the functions that these call, with the parameters that
they pass, and a log of the calls.

tests/integration/test_trackers.py compares the stand-ins' signatures with those of the packages where these are installed.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Any

ID = "0123456789ab"


class Recording(types.ModuleType):
    """calls: (function, arguments) in order.  trouble: function -> the exception that it raises."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.trouble: dict[str, Exception] = {}

    def note(self, function: str, **arguments: Any) -> None:
        if function in self.trouble:
            raise self.trouble[function]
        self.calls.append((function, arguments))


# MLflow 3.17


@dataclass(frozen=True)
class Metric:
    key: str
    value: float
    timestamp: int
    step: int


@dataclass(frozen=True)
class Param:
    key: str
    value: str


class MlflowException(Exception): ...


class FakeMlflow(Recording):
    def __init__(self) -> None:
        super().__init__("mlflow")
        self.entities = types.SimpleNamespace(Metric=Metric, Param=Param)
        self.exceptions = types.SimpleNamespace(MlflowException=MlflowException)
        self.server = False
        self.experiments: dict[str, str] = {}

    def is_tracking_uri_set(self) -> bool:
        return self.server

    def MlflowClient(self, tracking_uri: str | None = None) -> FakeMlflowClient:
        self.note("MlflowClient", tracking_uri=tracking_uri)
        return FakeMlflowClient(self)


class FakeMlflowClient:
    def __init__(self, package: FakeMlflow) -> None:
        self._package = package

    def get_experiment_by_name(self, name: str) -> Any:
        self._package.note("get_experiment_by_name", name=name)
        found = self._package.experiments.get(name)
        return None if found is None else types.SimpleNamespace(experiment_id=found)

    def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
        self._package.note("create_experiment", name=name, artifact_location=artifact_location)
        self._package.experiments[name] = "7"
        return "7"

    def create_run(self, experiment_id: str, run_name: str | None = None) -> Any:
        self._package.note("create_run", experiment_id=experiment_id, run_name=run_name)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=ID))

    def update_run(self, run_id: str, status: str | None = None) -> None:
        self._package.note("update_run", run_id=run_id, status=status)

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        self._package.note("log_batch", run_id=run_id, metrics=list(metrics), params=list(params))

    def log_dict(self, run_id: str, dictionary: dict[str, Any], artifact_file: str) -> None:
        self._package.note("log_dict", run_id=run_id, dictionary=dictionary, artifact_file=artifact_file)

    def set_tag(self, run_id: str, key: str, value: Any) -> None:
        self._package.note("set_tag", run_id=run_id, key=key, value=value)

    def set_terminated(self, run_id: str, status: str | None = None) -> None:
        self._package.note("set_terminated", run_id=run_id, status=status)


# SwanLab 0.10


class AuthenticationError(Exception): ...


class FakeSwanlab(Recording):
    """settings: what the environment says."""

    def __init__(self) -> None:
        super().__init__("swanlab")
        self.exceptions = types.SimpleNamespace(AuthenticationError=AuthenticationError)
        self.settings = types.SimpleNamespace(mode="online", api_key=None)

    def Settings(self) -> Any:
        if "Settings" in self.trouble:
            raise self.trouble["Settings"]
        return self.settings

    def init(self, *, log_dir: str, project: str, name: str, id: str, resume: str, config: dict[str, Any]) -> FakeSwanlabRun:
        self.note("init", log_dir=log_dir, project=project, name=name, id=id, resume=resume, config=config)
        return FakeSwanlabRun(self)

    def Text(self, content: str) -> tuple[str, str]:
        return "text", content


class FakeSwanlabRun:
    def __init__(self, package: FakeSwanlab) -> None:
        self._package = package

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self._package.note("log", data=data, step=step)

    def finish(self, state: str = "success", error: str | None = None) -> None:
        self._package.note("finish", state=state, error=error)


# Trackio 0.43


class FakeTrackio(Recording):
    def __init__(self) -> None:
        super().__init__("trackio")

    def init(self, project: str, name: str | None = None, config: Any = None, resume: str = "never", embed: bool = True) -> Any:
        self.note("init", project=project, name=name, config=config, resume=resume, embed=embed)
        return FakeTrackioRun(self)

    def Table(self, columns: list[str] | None = None, data: list[list[Any]] | None = None) -> tuple[str, Any, Any]:
        return "table", columns, data

    def finish(self) -> None:
        self.note("finish")


class FakeTrackioRun:
    def __init__(self, package: FakeTrackio) -> None:
        self._package = package

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self._package.note("log", metrics=metrics, step=step)
