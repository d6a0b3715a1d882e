"""RunFolder: one run at a time, secrets hidden, nothing lost on a new start."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlhub.errors import RunFolderError
from rlhub.tracking.run_folder import RunFolder

HOLDER = """
import sys, time
from pathlib import Path
from rlhub.tracking.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])):
    sys.stdout.write("locked\\n")
    sys.stdout.flush()
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunFolderError, match=rf"another run is using .*run \(pid {holder.pid} on .*experiment_name"):
            RunFolder(tmp_path / "run").open()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with RunFolder(tmp_path / "run") as folder:
        assert json.loads((folder.path / "run.lock").read_text())["pid"] == os.getpid()


def test_one_process_cannot_open_it_twice_but_again(tmp_path: Path) -> None:
    with RunFolder(tmp_path), pytest.raises(RunFolderError):
        RunFolder(tmp_path).open()
    with RunFolder(tmp_path) as folder:
        assert folder.logs.is_dir() and folder.generations.is_dir()


def test_without_flock_the_process_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    first = RunFolder(tmp_path).open()
    with pytest.raises(RunFolderError, match=f"pid {os.getpid()}"):
        RunFolder(tmp_path).open()
    holder = json.loads((tmp_path / "run.lock").read_text())
    (tmp_path / "run.lock").write_text(json.dumps({**holder, "host": "elsewhere"}))
    with pytest.raises(RunFolderError, match="elsewhere"):
        RunFolder(tmp_path).open()
    (tmp_path / "run.lock").write_text(json.dumps({**holder, "started": holder["started"] - 100}))  # the number was reused
    RunFolder(tmp_path).open().close()
    first.close()


def test_an_unwritable_place_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="default_local_dir"):
        RunFolder(tmp_path / "file" / "run").open()


def test_config_hides_secrets_and_keeps_the_earlier_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config({"trainer": {"seed": 1}, "env": {"WANDB_API_KEY": "hunter2"}})
    assert yaml.safe_load(folder.config.read_text()) == {"trainer": {"seed": 1}, "env": {"WANDB_API_KEY": "<redacted>"}}
    folder.write_config({"trainer": {"seed": 1}, "env": {"WANDB_API_KEY": "other"}})
    assert not (tmp_path / "config.1.yaml").exists()
    folder.write_config({"trainer": {"seed": 2}})
    assert yaml.safe_load((tmp_path / "config.1.yaml").read_text())["trainer"]["seed"] == 1
    assert yaml.safe_load(folder.config.read_text()) == {"trainer": {"seed": 2}}


def test_config_is_for_its_owner_alone_and_an_earlier_one_with_secrets_is_not_repeated(tmp_path: Path) -> None:
    folder, secret = RunFolder(tmp_path), {"ray": {"runtime_env": {"env_vars": {"LOGIN": "hunter2"}}}, "lr": 1}
    folder.config.write_text(yaml.safe_dump(secret))  # as versions that hid less have left it, readable by all
    folder.config.chmod(0o644)
    assert folder.changes(secret) == [] and folder.changes({**secret, "lr": 2}) == ["lr: 1 -> 2"]
    folder.write_config(secret)
    folder.write_config({**secret, "lr": 2})
    assert "hunter2" not in folder.config.read_text()
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("config*.yaml")} == {0o600}
    assert folder.changes({**secret, "lr": 3}) == ["lr: 2 -> 3"]  # what is hidden is no change


def test_changes_of_the_trainer_that_decide_what_is_learned_are_named(tmp_path: Path) -> None:
    """Not those that say how long, where and how often."""
    folder = RunFolder(tmp_path)
    before = {"trainer": {"seed": 1, "plugins": [], "save_freq": 5, "total_epochs": 1, "nnodes": 1, "deadline_s": {"sync": 1}}}
    folder.write_config(before)
    now = {"trainer": {"seed": 2, "plugins": ["mine"], "save_freq": 6, "total_epochs": 2, "nnodes": 2, "deadline_s": {"sync": 2}}}
    assert sorted(folder.changes(now)) == ["trainer.plugins: [] -> ['mine']", "trainer.seed: 1 -> 2"]


def test_notes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.note("wandb") is None
    folder.write_note("wandb", "abc")
    folder.write_note("other", "x")
    assert RunFolder(tmp_path).note("wandb") == "abc"
    (tmp_path / "tracking.json").write_text("{")
    assert folder.note("wandb") is None


def test_set_aside_loses_nothing(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        assert folder.set_aside() is None
        for name in ("metrics.jsonl", "global_step_3/manifest.json", "logs/actor-rank0.log"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(name)
        assert folder.set_aside() == tmp_path / "earlier-1"
        assert (tmp_path / "earlier-1" / "global_step_3" / "manifest.json").read_text() == "global_step_3/manifest.json"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier-1", "generations", "logs", "run.lock"]
        (tmp_path / "metrics.jsonl").write_text("2")
        assert folder.set_aside() == tmp_path / "earlier-2"
        with pytest.raises(RunFolderError):
            RunFolder(tmp_path).open()
