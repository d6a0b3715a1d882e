"""The trackers against stand-ins of their packages; the real ones run in tests/integration."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
import types
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rlhub.errors import ConfigError, RegistryError, RlhubError
from rlhub.registry import Registry
from rlhub.tracking.mlflow import MlflowTracker, key
from rlhub.tracking.recorder import EXTRAS, TRACKERS, login_problems, package_problems
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.swanlab import SwanlabTracker
from rlhub.tracking.tracker import GenerationRow, RunInfo
from rlhub.tracking.trackio import TrackioTracker
from rlhub.tracking.wandb import WandbTracker
from tests.support.source_trees import ROOT
from tests.support.trackers import ID, AuthenticationError, FakeMlflow, FakeSwanlab, FakeTrackio, Metric, MlflowException, Param

T = TypeVar("T", bound=types.ModuleType)


class FakeWandb(types.ModuleType):
    """Records calls; `trouble` is raised by init or log."""

    class Error(Exception): ...

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[tuple[str, Any]] = []
        self.trouble: dict[str, Exception] = {}
        self.settings = types.SimpleNamespace(mode="online")

    def setup(self) -> FakeWandb:
        return self

    def login(self, *, verify: bool) -> bool:
        self.calls.append(("login", verify))
        if "login" in self.trouble:
            raise self.trouble["login"]
        return True

    def init(self, **settings: Any) -> FakeWandb:
        if "init" in self.trouble:
            raise self.trouble["init"]
        self.calls.append(("init", settings))
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        if "log" in self.trouble:
            raise self.trouble["log"]
        self.calls.append(("log", (step, values)))

    def finish(self, exit_code: int) -> None:
        self.calls.append(("finish", exit_code))

    def Table(self, columns: list[str], data: list[list[Any]]) -> tuple[list[str], list[list[Any]]]:
        return columns, data


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    return stands_in(fake, monkeypatch)


def stands_in(fake: T, monkeypatch: pytest.MonkeyPatch) -> T:
    """The package of that name, installed."""
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace(origin="somewhere"))
    return fake


def run(folder: Path, resumed: int | None = None) -> RunInfo:
    return RunInfo(project="p", experiment="e", folder=folder, config={"a": 1}, resumed_step=resumed)


def test_wandb_gets_everything_once(tmp_path: Path, wandb: FakeWandb) -> None:
    tracker = WandbTracker()
    tracker.start(run(tmp_path))
    tracker.log(3, {"x": 1.0})
    tracker.log_generations(3, "val", [GenerationRow(prompt="p", response="r", score=1.0)])
    tracker.finish("failed")
    assert [name for name, _ in wandb.calls] == ["init", "log", "log", "finish"]
    assert wandb.calls[1][1] == (3, {"x": 1.0}) and wandb.calls[3][1] == 1
    assert wandb.calls[2][1][1]["samples/val"][1] == [[3, "p", "r", 1.0, "", "", ""]]


def test_a_resumed_run_continues_the_same_wandb_run_and_a_new_one_does_not(tmp_path: Path, wandb: FakeWandb) -> None:
    for resumed in (None, 4, None):
        WandbTracker().start(run(tmp_path, resumed))
    ids = [settings["id"] for _, settings in wandb.calls]
    assert ids[0] == ids[1] != ids[2]
    assert wandb.calls[0][1] | {"id": ""} == {
        "project": "p", "name": "e", "id": "", "resume": "allow", "dir": str(tmp_path), "config": {"a": 1},
    }  # fmt: skip
    assert RunFolder(tmp_path).note("wandb_run_id") == ids[2]


def test_a_login_is_asked_for_without_a_network_and_only_where_one_is_needed(wandb: FakeWandb) -> None:
    assert login_problems(["console", "wandb", "wandb"]) == [] and wandb.calls == [("login", False)]
    wandb.trouble = {"login": wandb.Error("No API key configured.")}
    (problem,) = login_problems(["wandb"])
    for remedy in ("No API key configured", "`wandb login`", "WANDB_API_KEY", "WANDB_MODE=offline", "trainer.logger"):
        assert remedy in problem
    wandb.settings.mode = "offline"
    assert login_problems(["wandb"]) == []


def test_wandb_troubles_are_typed(tmp_path: Path, wandb: FakeWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb.trouble = {"init": wandb.Error("no API key")}
    with pytest.raises(ConfigError, match="no API key.*WANDB_MODE=offline"):
        WandbTracker().start(run(tmp_path))
    wandb.trouble = {"log": wandb.Error("gone")}
    tracker = WandbTracker()
    tracker.start(run(tmp_path))
    with pytest.raises(RlhubError, match="gone"):
        tracker.log(1, {"x": 1.0})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


BUILT_IN = ("mlflow", "swanlab", "tensorboard", "trackio", "wandb")


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a folder of the package's name lies about, which Python would import as a package without code."""
    command = rf"pip install 'rlhub\[{name}\]'"
    for spec in (None, types.SimpleNamespace(origin=None)):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, spec=spec: spec)
        with pytest.raises(ConfigError, match=f"{name}, which is not installed; run: {command}"):
            TRACKERS.get(name)().start(run(tmp_path))
        (problem,) = package_problems([name, name])
        assert re.search(f"{name} needs the package {name}, which is not installed; run: {command}", problem)


def test_the_extras_are_those_of_the_packaging_and_of_the_guide() -> None:
    packaging, guide = (ROOT / "setup.py").read_text(), (ROOT / "rlhub" / "tracking" / "README.md").read_text()
    assert [name for name in BUILT_IN if f"| `{name}` | `pip install 'rlhub[{name}]'` |" not in guide] == []
    assert {name for name in BUILT_IN if re.search(rf'^    "{name}": \[', packaging, re.MULTILINE)} == EXTRAS == set(BUILT_IN)


SAMPLES = [GenerationRow(prompt="1+1=", response="2", score=1.0), GenerationRow(prompt="x", response="y")]
TABLE = {
    "columns": ["step", "prompt", "response", "score", "ground_truth", "data_source", "finish_reason"],
    "data": [[3, "1+1=", "2", 1.0, "", "", ""], [3, "x", "y", None, "", "", ""]],
}
METRICS = {"val/pass@1": 0.5, "note": "text", "n": 3}


# MLflow


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    return stands_in(FakeMlflow(), monkeypatch)


def test_mlflow_gets_everything_once(tmp_path: Path, mlflow: FakeMlflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhub.tracking.mlflow.time.time", lambda: 12.5)
    tracker = MlflowTracker()
    info = run(tmp_path)
    info.config = {"trainer": {"seed": 1, "logger": ["a", "b"]}, "@": "x" * 9000}
    tracker.start(info)
    tracker.log_generations(3, "val", SAMPLES)
    tracker.log(3, METRICS)
    tracker.finish("failed", "boom")
    own = tmp_path / "trackers" / "mlflow"
    params = [Param("trainer.seed", "1"), Param("trainer.logger", "['a', 'b']"), Param("_at_", "x" * 6000)]
    metrics = [Metric("val/pass_at_1", 0.5, 12500, 3), Metric("n", 3.0, 12500, 3)]
    assert mlflow.calls == [
        ("MlflowClient", {"tracking_uri": f"sqlite:///{own}/mlflow.db"}),
        ("get_experiment_by_name", {"name": "p"}),
        ("create_experiment", {"name": "p", "artifact_location": (own / "artifacts").as_uri()}),
        ("create_run", {"experiment_id": "7", "run_name": "e"}),
        ("log_batch", {"run_id": ID, "metrics": [], "params": params}),
        ("log_dict", {"run_id": ID, "dictionary": TABLE, "artifact_file": "samples/val-000003.json"}),
        ("log_batch", {"run_id": ID, "metrics": metrics, "params": []}),
        ("set_terminated", {"run_id": ID, "status": "FAILED"}),
        ("set_tag", {"run_id": ID, "key": "message", "value": "boom"}),
    ]


def test_mlflow_continues_a_resumed_run_and_opens_a_new_one_otherwise(tmp_path: Path, mlflow: FakeMlflow) -> None:
    """On a server that the user has named, in an experiment that is there."""
    mlflow.server, mlflow.experiments = True, {"p": "3"}
    for resumed in (None, 4, None):
        MlflowTracker().start(run(tmp_path, resumed))
    assert [name for name, _ in mlflow.calls if "run" in name] == ["create_run", "update_run", "create_run"]
    assert ("update_run", {"run_id": ID, "status": "RUNNING"}) in mlflow.calls
    assert ("MlflowClient", {"tracking_uri": None}) in mlflow.calls and not (tmp_path / "trackers").exists()
    assert "create_experiment" not in dict(mlflow.calls)


def test_mlflow_takes_so_many_entries_a_request(tmp_path: Path, mlflow: FakeMlflow) -> None:
    tracker, info = MlflowTracker(), run(tmp_path)
    info.config = {f"s{i}": i for i in range(250)}
    tracker.start(info)
    tracker.log(1, {f"m{i}": i for i in range(2001)})
    sent = [(len(call["params"]), len(call["metrics"])) for name, call in mlflow.calls if name == "log_batch"]
    assert sent == [(100, 0), (100, 0), (50, 0), (0, 1000), (0, 1000), (0, 1)]


def test_mlflow_keys() -> None:
    assert key("val-core/a//b/acc/best@16/mean") == "val-core/a/b/acc/best_at_16/mean"
    assert key("a b.c:d-e_f") == "a b.c:d-e_f" and key("ä+*") == "___" and len(key("x" * 300)) == 250


def test_mlflow_troubles_are_typed(tmp_path: Path, mlflow: FakeMlflow) -> None:
    mlflow.trouble = {"get_experiment_by_name": MlflowException("refused")}
    with pytest.raises(ConfigError, match=r"refused.*MLFLOW_TRACKING_URI.*rlhub\[mlflow\].*trainer.logger"):
        MlflowTracker().start(run(tmp_path))
    mlflow.trouble = {"log_batch": MlflowException("gone"), "set_terminated": MlflowException("away")}
    tracker, info = MlflowTracker(), run(tmp_path)
    info.config = {}
    tracker.start(info)
    with pytest.raises(RlhubError, match="gone"):
        tracker.log(1, {"x": 1.0})
    with pytest.raises(RlhubError, match="away"):
        tracker.finish("finished")


# SwanLab


@pytest.fixture
def swanlab(monkeypatch: pytest.MonkeyPatch) -> FakeSwanlab:
    return stands_in(FakeSwanlab(), monkeypatch)


def test_swanlab_gets_everything_once(tmp_path: Path, swanlab: FakeSwanlab) -> None:
    tracker = SwanlabTracker()
    tracker.start(run(tmp_path))
    tracker.log_generations(3, "val", SAMPLES)
    tracker.log(3, METRICS)
    tracker.finish("failed", "boom")
    text = "**1+1=**\n\n2\n\nscore: 1.0\n\n---\n\n**x**\n\ny\n\nscore: None"
    settings = {"project": "p", "name": "e", "resume": "allow", "log_dir": f"{tmp_path}/trackers/swanlab", "config": {"a": 1}}
    assert swanlab.calls == [
        ("init", settings | {"id": RunFolder(tmp_path).note("swanlab_run_id")}),
        ("log", {"data": {"samples/val": ("text", text)}, "step": 3}),
        ("log", {"data": {"val/pass@1": 0.5, "n": 3}, "step": 3}),
        ("finish", {"state": "crashed", "error": "boom"}),
    ]


@pytest.mark.parametrize(("status", "state"), [("finished", "success"), ("interrupted", "aborted")])
def test_swanlab_is_told_how_a_run_ended(status: Any, state: str, tmp_path: Path, swanlab: FakeSwanlab) -> None:
    tracker = SwanlabTracker()
    tracker.start(run(tmp_path))
    tracker.finish(status, "SIGTERM")
    assert swanlab.calls[-1] == ("finish", {"state": state, "error": None})


def test_swanlab_continues_a_resumed_run_and_opens_a_new_one_otherwise(tmp_path: Path, swanlab: FakeSwanlab) -> None:
    for resumed in (None, 4, None):
        SwanlabTracker().start(run(tmp_path, resumed))
    ids = [call["id"] for _, call in swanlab.calls]
    assert ids[0] == ids[1] != ids[2]


def test_ctrl_c_stays_the_runs_own(tmp_path: Path, swanlab: FakeSwanlab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package installs a handler that ends its run at once."""
    before, init = signal.getsignal(signal.SIGINT), swanlab.init

    def installing(**settings: Any) -> Any:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return init(**settings)

    monkeypatch.setattr(swanlab, "init", installing)
    SwanlabTracker().start(run(tmp_path))
    assert signal.getsignal(signal.SIGINT) is before


def test_swanlab_needs_a_login_online_alone(tmp_path: Path, swanlab: FakeSwanlab) -> None:
    (problem,) = login_problems(["swanlab"])
    for remedy in ("`swanlab login`", "SWANLAB_API_KEY", "SWANLAB_MODE=offline", "trainer.logger"):
        assert remedy in problem
    for mode, api_key in (("online", "k"), ("offline", None), ("local", None)):
        swanlab.settings = types.SimpleNamespace(mode=mode, api_key=api_key)
        assert login_problems(["swanlab"]) == []
    swanlab.trouble = {"Settings": ValueError("Invalid mode: bad")}
    assert "Invalid mode: bad" in login_problems(["swanlab"])[0]
    for trouble in (AuthenticationError("wrong key"), RuntimeError("no TTY"), OSError("no network")):
        swanlab.trouble = {"init": trouble}
        with pytest.raises(ConfigError, match=f"{trouble}.*`swanlab login`"):
            SwanlabTracker().start(run(tmp_path))


# Trackio


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> FakeTrackio:
    monkeypatch.setenv("TRACKIO_DIR", "")  # so that what the tracker sets is taken back
    monkeypatch.delenv("TRACKIO_DIR")
    return stands_in(FakeTrackio(), monkeypatch)


def test_trackio_gets_everything_once(tmp_path: Path, trackio: FakeTrackio) -> None:
    tracker = TrackioTracker()
    tracker.start(run(tmp_path))
    tracker.log_generations(3, "val", SAMPLES)
    tracker.log(3, METRICS)
    tracker.finish("finished")
    assert trackio.calls == [
        ("init", {"project": "p", "name": "e", "config": {"a": 1}, "resume": "never", "embed": False}),
        ("log", {"metrics": {"samples/val": ("table", TABLE["columns"], TABLE["data"])}, "step": 3}),
        ("log", {"metrics": METRICS, "step": 3}),
        ("finish", {}),
    ]
    assert os.environ["TRACKIO_DIR"] == f"{tmp_path}/trackers/trackio"


def test_trackio_continues_a_resumed_run_in_the_folder_that_the_user_set(
    tmp_path: Path, trackio: FakeTrackio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", "/shared")
    for resumed in (None, 4):
        TrackioTracker().start(run(tmp_path, resumed))
    assert [call["resume"] for _, call in trackio.calls] == ["never", "allow"] and os.environ["TRACKIO_DIR"] == "/shared"


def test_trackio_troubles_are_typed(tmp_path: Path, trackio: FakeTrackio) -> None:
    trackio.trouble = {"init": ValueError("needs a write token")}
    with pytest.raises(ConfigError, match="needs a write token.*TRACKIO_SERVER_URL.*trainer.logger"):
        TrackioTracker().start(run(tmp_path))


def test_the_registry_is_light_and_helpful() -> None:
    assert isinstance(TRACKERS, Registry) and {"console", *BUILT_IN} <= set(TRACKERS.names())
    assert TRACKERS.row("wandb").requires == {"wandb"}
    with pytest.raises(RegistryError, match="did you mean 'tensorboard'"):
        TRACKERS.get("tensorbord")
