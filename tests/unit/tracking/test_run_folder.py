"""RunFolder: one run at a time, secrets hidden, nothing lost on a new start."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
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


def tree(folder: Path) -> dict[str, str]:
    """Files by relative path, those of a run's lock left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock")
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


CHECKOUT = (".git/HEAD", "src/model.py", "data/train.parquet", "README.md", "config.yaml", "logs/notes.txt")


def test_a_folder_of_other_files_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    put(tmp_path, *CHECKOUT)
    before = tree(tmp_path)
    with pytest.raises(
        RunFolderError, match=r"is not empty and holds no run \(it has .git, README.md.*default_local_dir.*new folder"
    ):
        RunFolder(tmp_path).open()
    assert tree(tmp_path) == before and not (tmp_path / "run.lock").exists() and not (tmp_path / "generations").exists()
    with pytest.raises(RunFolderError, match="holds no run"):
        put(tmp_path / "settings", "config.yaml")  # a name that a run has too
        RunFolder(tmp_path / "settings").open()


@pytest.mark.parametrize("names", [(), ("lost+found/", ".gitignore"), ("logs/", "generations/")])
def test_an_empty_folder_is_taken(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).write_text("")
    RunFolder(tmp_path).open().close()


def test_a_run_is_known_without_its_lock(tmp_path: Path) -> None:
    """Copied without it, or removed by someone who thought that it was stale."""
    put(tmp_path / "one", "global_step_3/manifest.json", "mine.txt")
    put(tmp_path / "two", "mine.txt")
    (tmp_path / "two" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    for name in ("one", "two"):
        RunFolder(tmp_path / name).open().close()


def test_setting_aside_leaves_the_users_own_files(tmp_path: Path) -> None:
    """Those that were put into the folder of a run."""
    with RunFolder(tmp_path) as folder:
        put(
            tmp_path,
            *(name for name in CHECKOUT if name not in ("config.yaml", "logs/notes.txt")),
            "plots/loss.png",
            "batches.txt",
        )
        users = tree(tmp_path)
        run = [
            "config.yaml", "config.2.yaml", "metrics.jsonl", "prompts.jsonl", "report.html", "trace.json", "tracking.json",
            "logs/actor-rank0.log", "generations/val-000001.jsonl", "batches/step-000001.safetensors", "tensorboard/events.1",
            "wandb/latest-run/files", "latest_checkpointed_iteration.txt", "metrics.jsonl.part",
            *(f"{prefix}global_step_3/manifest.json" for prefix in ("", ".saving_", ".replaced_", ".deleting_")),
        ]  # fmt: skip
        put(tmp_path, *run)
        assert folder.set_aside() == tmp_path / "earlier-1"
        assert {name: text for name, text in tree(tmp_path).items() if not name.startswith("earlier-1/")} == users
        assert tree(tmp_path / "earlier-1") == {name: name for name in run}
        assert folder.set_aside() is None


def test_the_names_of_a_run_are_those_that_its_parts_write() -> None:
    from rlhub.checkpoint.store import ASIDE, DELETING, POINTER, PREFIX, REPLACED
    from rlhub.sharding_manager.files import PREFIX as WEIGHTS
    from rlhub.tracking.run_folder import WRITTEN, _matches
    from rlhub.trainer.ppo.offline_source import RECORDINGS
    from rlhub.trainer.ppo.stream_source import FILE

    steps = [f"{prefix}{PREFIX}7" for prefix in ("", ASIDE, DELETING, REPLACED)]
    for name in (*steps, POINTER, FILE, RECORDINGS, f"{WEIGHTS}0123"):
        assert _matches(Path(name), WRITTEN), name


@pytest.mark.parametrize("name", ["metrics.jsonl", "latest_checkpointed_iteration.txt", "config.yaml", "report.html", "run.lock"])
def test_a_folder_where_a_run_has_a_file_is_named_before_the_start(tmp_path: Path, name: str) -> None:
    put(tmp_path, "global_step_1/manifest.json")
    (tmp_path / name).mkdir()
    with pytest.raises(RunFolderError, match=f"{name} is a folder, and a run has a file of that name there; move it away"):
        RunFolder(tmp_path).open()


def test_a_file_where_a_run_has_a_folder_is_named_before_the_start(tmp_path: Path) -> None:
    put(tmp_path, "global_step_1/manifest.json", "logs")
    with pytest.raises(RunFolderError, match="logs is a file, and a run has a folder of that name there"):
        RunFolder(tmp_path).open()


def start_holder(folder: Path) -> subprocess.Popen[str]:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
    return holder


def test_two_runs_do_not_write_side_by_side_when_the_lock_file_is_removed(tmp_path: Path) -> None:
    holder = start_holder(tmp_path / "run")
    try:
        (tmp_path / "run" / "run.lock").unlink()
        with pytest.raises(RunFolderError, match="another run is using"):
            RunFolder(tmp_path / "run").open()
    finally:
        holder.kill()
        holder.communicate()
    RunFolder(tmp_path / "run").open().close()


def test_a_removed_lock_file_is_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunFolder(tmp_path) as folder:
        (tmp_path / "run.lock").unlink()
        folder.check()
        assert "run.lock was removed" in caplog.text and json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
        caplog.clear()
        folder.check()
        assert not caplog.text
        with pytest.raises(RunFolderError, match=f"another run is using .*pid {os.getpid()}"):
            RunFolder(tmp_path).open()


def test_a_removed_or_moved_folder_is_told(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.check()
        (tmp_path / "run").rename(tmp_path / "other")
        with pytest.raises(RunFolderError, match=f"{tmp_path}/run was moved to {tmp_path}/other while.*move it back and start"):
            folder.check()
        (tmp_path / "run").mkdir()  # another in its place
        with pytest.raises(RunFolderError, match="was moved to"):
            folder.check()
        (tmp_path / "run").rmdir()
        shutil.rmtree(tmp_path / "other")
        with pytest.raises(RunFolderError, match="was removed while the run used it.*newest checkpoint"):
            folder.check()


def test_whoever_ended_without_a_word_is_known(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        assert folder.abandoned_by is None
    holder = start_holder(tmp_path / "run")
    holder.kill()
    holder.communicate()
    with RunFolder(tmp_path / "run") as folder:
        assert folder.abandoned_by is not None and f"pid {holder.pid}" in folder.abandoned_by
    with RunFolder(tmp_path / "run") as folder:
        assert folder.abandoned_by is None
