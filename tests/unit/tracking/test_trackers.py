"""The W&B and TensorBoard adapters against stand-ins of their libraries; the real ones run in tests/integration."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rlhub.errors import ConfigError, RegistryError, RlhubError
from rlhub.registry import Registry
from rlhub.tracking.registry import TRACKERS, login_problems
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.tracker import GenerationRow, RunInfo
from rlhub.tracking.wandb import WandbTracker


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
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
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
    for name in ("wandb", "tensorboard"):
        with pytest.raises(ConfigError, match=f"{name}, which is not installed"):
            TRACKERS.get(name)().start(run(tmp_path))


def test_the_registry_is_light_and_helpful() -> None:
    assert isinstance(TRACKERS, Registry) and {"console", "tensorboard", "wandb"} <= set(TRACKERS.names())
    assert TRACKERS.row("wandb").requires == {"wandb"}
    with pytest.raises(RegistryError, match="did you mean 'tensorboard'"):
        TRACKERS.get("tensorbord")
