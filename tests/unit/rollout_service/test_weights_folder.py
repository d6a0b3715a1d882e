from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhub.rollout_service.weights_folder import PREFIX, files_bytes, open_weights_folder, remove_abandoned

HOLD = """
import sys, time
from pathlib import Path
from rlhub.rollout_service.weights_folder import open_weights_folder
memory = Path(sys.argv[1])
folder = open_weights_folder(None, one_machine=True, run_folder=memory, model_bytes=0, memory=memory)
print(folder.path, flush=True)
time.sleep(60)
"""


def opened(tmp_path: Path, configured: str | None = None, *, one_machine: bool = True, model_bytes: int = 0):  # type: ignore[no-untyped-def]
    memory = tmp_path / "memory"
    memory.mkdir(exist_ok=True)
    return open_weights_folder(
        configured, one_machine=one_machine, run_folder=tmp_path / "run", model_bytes=model_bytes, memory=memory
    )


def test_on_one_machine_it_is_in_memory_and_goes_with_the_run(tmp_path: Path) -> None:
    folder, other = opened(tmp_path), opened(tmp_path)
    assert folder.path.parent == other.path.parent == tmp_path / "memory" and folder.path.is_dir() and other.path.is_dir()
    (folder.path / "version-0").mkdir()
    folder.close()
    folder.close()
    assert other.path.is_dir()
    other.close()
    assert not list((tmp_path / "memory").iterdir())


@pytest.mark.parametrize(("one_machine", "model_bytes"), [(False, 0), (True, 1 << 60)])
def test_elsewhere_it_is_below_the_run_folder(tmp_path: Path, one_machine: bool, model_bytes: int) -> None:
    folder = opened(tmp_path, one_machine=one_machine, model_bytes=model_bytes)
    assert folder.path == tmp_path / "run" / "rlhub-weights-in-flight" and folder.path.is_dir()
    folder.close()
    assert not folder.path.exists()


def test_memory_that_cannot_be_written_is_said_and_the_run_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container whose /dev/shm is read-only; the tests' user may write everywhere."""
    real = os.open

    def refuse(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if str(path).startswith(str(tmp_path / "memory")) and flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    folder = opened(tmp_path)
    assert folder.path.parent == tmp_path / "run" and folder.path.is_dir()
    assert f"{tmp_path}/memory cannot be used (Read-only file system): weights are published through" in caplog.text
    folder.close()


def test_a_users_folder_called_weights_is_not_removed(tmp_path: Path) -> None:
    """Below the run folder, where someone may keep some."""
    (tmp_path / "run" / "weights").mkdir(parents=True)
    opened(tmp_path, one_machine=False).close()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["weights"]


def test_a_configured_folder_stays(tmp_path: Path) -> None:
    folder = opened(tmp_path, str(tmp_path / "mine"))
    folder.close()
    assert folder.path == tmp_path / "mine" and folder.path.is_dir()


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    path = Path(child.stdout.readline().strip())
    try:
        remove_abandoned(tmp_path)
        assert path.is_dir() and path.name.startswith(PREFIX), "it is in use"
    finally:
        child.kill()
        child.wait()
    remove_abandoned(tmp_path)
    assert not list(tmp_path.iterdir())


def test_bytes_of_a_models_files(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(b"12345")
    (tmp_path / "config.json").write_text("{}")
    assert files_bytes(str(tmp_path)) == 5 and files_bytes(None) == 0
