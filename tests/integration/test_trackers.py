"""The real packages behind the recorder, on this machine alone, with a run that is resumed in a second process's place.

MLflow, SwanLab and Trackio are not part of the tested environment, whose versions two of them exclude: their tests run where
`pip install 'rlhub[mlflow]'` and so on have installed them, and are skipped elsewhere.  What the trackers call of them is
tested everywhere against stand-ins, whose signatures are compared here.
"""

from __future__ import annotations

import inspect
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import trackers

PROGRAM = """
import sys
from pathlib import Path
from rlhub.tracking.recorder import Recorder
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.tracker import GenerationRow, RunInfo

path, tracker, resumed, status = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
with RunFolder(path) as folder:
    info = RunInfo(project="p", experiment="e", folder=path, config={"seed": 1, "api_key": "hunter2"}, total_steps=3,
                   resumed_step=None if resumed < 0 else resumed)
    recorder = Recorder(folder, info, [tracker])
    recorder.start()
    for step in range(resumed + 1, resumed + 3):
        recorder.log_generations(step, "val", [GenerationRow(prompt="1+1=", response="2", score=1.0)])
        recorder.log(step, {"val/pass@1": step / 10, "actor/pg_loss": float("nan"), "note": "text"})
    recorder.finish(status, "boom" if status == "failed" else "")
"""


def run(path: Path, tracker: str, resumed: int, monkeypatch: pytest.MonkeyPatch, status: str = "finished") -> str:
    for name in ("WANDB_MODE", "SWANLAB_MODE"):
        monkeypatch.setenv(name, "offline")
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    program = [sys.executable, "-c", PROGRAM, str(path), tracker, str(resumed), status]
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert "failed and gets nothing more" not in done.stdout
    return done.stdout


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, "tensorboard", -1, monkeypatch)
    run(tmp_path, "tensorboard", 0, monkeypatch)  # step 1 is done again
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, round(event.value, 6)) for event in events.Scalars("val/pass@1")] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert "samples/val/text_summary" in events.Tags()["tensors"]


def test_wandb_offline_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, "wandb", -1, monkeypatch)
    run(tmp_path, "wandb", 1, monkeypatch)
    run(tmp_path, "wandb", -1, monkeypatch)
    ids = [
        re.sub(r".*-", "", path.name)
        for path in sorted((tmp_path / "wandb").glob("offline-run-*"), key=lambda p: p.stat().st_ctime_ns)
    ]
    assert len(ids) == 3 and ids[0] == ids[1] != ids[2]
    written = b"".join(path.read_bytes() for path in (tmp_path / "wandb").rglob("*.wandb"))
    assert b"val/pass@1" in written and b"hunter2" not in written


def test_mlflow_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    run(tmp_path, "mlflow", -1, monkeypatch)
    run(tmp_path, "mlflow", 0, monkeypatch, "failed")  # step 1 is done again
    own = tmp_path / "trackers" / "mlflow"
    client = mlflow.MlflowClient(f"sqlite:///{own}/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("p").experiment_id])
    assert (found.info.run_name, found.info.status, found.data.tags["message"]) == ("e", "FAILED", "boom")
    assert found.data.params == {"seed": "1", "api_key": "<redacted>"}
    history = client.get_metric_history(found.info.run_id, "val/pass_at_1")
    assert sorted({(one.step, one.value) for one in history}) == [(0, 0.0), (1, 0.1), (2, 0.2)]
    samples = json.loads(next(own.rglob("samples/val-000002.json")).read_text())
    assert samples["data"] == [[2, "1+1=", "2", 1.0, "", "", ""]]


def test_swanlab_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    run(tmp_path, "swanlab", -1, monkeypatch)
    run(tmp_path, "swanlab", 1, monkeypatch, "failed")
    folders = list((tmp_path / "trackers" / "swanlab").glob("run-*"))
    assert len(folders) == 2 and len({folder.name.rpartition("-")[2] for folder in folders}) == 1
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    written = b"".join(path.read_bytes() for path in files if "metadata" not in path.name)  # which has the test's own command
    assert b"val/pass@1" in written and b"1+1=" in written and b"boom" in written and b"hunter2" not in written


def test_trackio_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    run(tmp_path, "trackio", -1, monkeypatch)
    run(tmp_path, "trackio", 1, monkeypatch)
    run(tmp_path, "trackio", -1, monkeypatch)
    with sqlite3.connect(tmp_path / "trackers" / "trackio" / "p.db") as database:
        rows = database.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
    logged = [(run_id, step, json.loads(metrics)) for run_id, name, step, metrics in rows if name == "e"]
    first, *others = dict.fromkeys(run_id for run_id, _, _ in logged)
    scores = {step: metrics["val/pass@1"] for run_id, step, metrics in logged if run_id == first and "val/pass@1" in metrics}
    assert scores == {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3} and len(others) == 1
    assert any("1+1=" in json.dumps(metrics) for _, _, metrics in logged)


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def functions(package: Any, name: str) -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """(the stand-in's, the package's) functions that the tracker calls."""
    if name == "mlflow":
        client = trackers.FakeMlflowClient
        own = [getattr(client, method) for method in vars(client) if not method.startswith("_")]
        return [
            (trackers.FakeMlflow.MlflowClient, package.MlflowClient.__init__),
            (trackers.FakeMlflow.is_tracking_uri_set, lambda self: package.is_tracking_uri_set()),
            *((function, getattr(package.MlflowClient, function.__name__)) for function in own),
            (trackers.Metric.__init__, package.entities.Metric.__init__),
            (trackers.Param.__init__, package.entities.Param.__init__),
        ]
    if name == "swanlab":
        stand_in, run_of, text = trackers.FakeSwanlab, trackers.FakeSwanlabRun, (trackers.FakeSwanlab.Text, package.Text.__init__)
    else:
        stand_in, run_of, text = (
            trackers.FakeTrackio,
            trackers.FakeTrackioRun,
            (trackers.FakeTrackio.Table, package.Table.__init__),
        )
    of_runs = [(getattr(run_of, method), getattr(package.Run, method)) for method in vars(run_of) if not method.startswith("_")]
    return [(stand_in.init, package.init), *of_runs, text]


@pytest.mark.parametrize("name", ["mlflow", "swanlab", "trackio"])
def test_the_stand_ins_take_what_the_packages_take(name: str) -> None:
    """Every parameter of a stand-in is one of the package's, and the package asks for no other."""
    package = pytest.importorskip(name)
    for stand_in, real in functions(package, name):
        passed = {one: value for one, value in inspect.signature(stand_in).parameters.items() if one != "self"}
        taken = {one: value for one, value in inspect.signature(real).parameters.items() if one != "self"}
        assert set(passed) <= set(taken), (stand_in.__qualname__, set(passed) - set(taken))
        needed = {one for one, value in taken.items() if value.default is value.empty and value.kind not in VARIADIC}
        assert needed <= set(passed), (stand_in.__qualname__, needed - set(passed))
    with pytest.raises(AssertionError):  # the control
        assert {"run_folder"} <= set(inspect.signature(package.init if name != "mlflow" else package.start_run).parameters)
