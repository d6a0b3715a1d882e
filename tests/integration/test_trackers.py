"""The real TensorBoard and W&B (offline) behind the recorder, with a run that is resumed in a second process's place."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from rlhub.tracking.recorder import Recorder
from rlhub.tracking.run_folder import RunFolder
from rlhub.tracking.tracker import GenerationRow, RunInfo

path, tracker, resumed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with RunFolder(path) as folder:
    info = RunInfo(project="p", experiment="e", folder=path, config={"seed": 1, "api_key": "hunter2"}, total_steps=3,
                   resumed_step=None if resumed < 0 else resumed)
    recorder = Recorder(folder, info, [tracker])
    recorder.start()
    for step in range(resumed + 1, resumed + 3):
        recorder.log_generations(step, "val", [GenerationRow(prompt="1+1=", response="2", score=1.0)])
        recorder.log(step, {"val/pass@1": step / 10, "actor/pg_loss": float("nan")})
    recorder.finish("finished")
"""


def run(path: Path, tracker: str, resumed: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("WANDB_MODE", "offline")
    program = [sys.executable, "-c", PROGRAM, str(path), tracker, str(resumed)]
    done = subprocess.run(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
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
