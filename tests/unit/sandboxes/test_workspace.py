"""The folder of a sandbox as the host uses it: paths, links, sizes, and removal whatever is inside."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhub.sandboxes.base import SandboxError
from rlhub.sandboxes.workspace import Workspace, remove_left

MOST = 1 << 16


@pytest.fixture
def files() -> Iterator[Workspace]:
    made = Workspace("box")
    yield made
    made.remove()


@pytest.mark.parametrize("path", ["x", "a/b/x", "/workspace/x", "./x", "a//x"])
def test_what_is_written_is_read(files: Workspace, path: str) -> None:
    files.write(path, b"one two", MOST)
    files.write(path, b"three", MOST)
    assert files.read(path, MOST) == b"three"


@pytest.mark.parametrize("path", ["", "/", ".", "/workspace", "/etc/passwd", "../x", "a/../../x", "/workspace/../x", "x\0y"])
def test_other_paths_are_refused(files: Workspace, path: str) -> None:
    for call in (lambda: files.read(path, MOST), lambda: files.write(path, b"", MOST)):
        with pytest.raises(SandboxError, match="no path of a file below"):
            call()


def test_sizes_are_bounded(files: Workspace) -> None:
    with pytest.raises(SandboxError, match="over the limit"):
        files.write("x", b"12345", 4)
    files.write("x", b"12345", 5)
    with pytest.raises(SandboxError, match="larger than 4"):
        files.read("x", 4)


def test_used_bytes_counts_content_and_entries(files: Workspace) -> None:
    empty = files.used_bytes(1 << 30)
    files.write("x", b"x" * 100_000, 1 << 20)
    one = files.used_bytes(1 << 30)
    assert one >= empty + 100_000
    for number in range(50):
        files.write(f"d/{number}", b"", MOST)
    assert files.used_bytes(1 << 30) >= one + 50 * 1024
    assert files.used_bytes(1000) > 1000


def test_links_are_not_followed_and_not_counted(files: Workspace, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"x" * 1_000_000)
    before = files.used_bytes(1 << 30)
    (files.work / "link").symlink_to(tmp_path)
    (files.work / "file").symlink_to(tmp_path / "big")
    assert files.used_bytes(1 << 30) < before + 100_000
    for path in ("link/big", "file"):
        with pytest.raises(SandboxError, match="links are not followed"):
            files.read(path, 1 << 30)
    with pytest.raises(SandboxError):
        files.write("link/new", b"x", MOST)
    assert not (tmp_path / "new").exists()
    files.remove()
    assert (tmp_path / "big").exists()


def test_a_folder_of_any_depth_is_measured_and_removed(files: Workspace) -> None:
    fd = os.open(files.work, os.O_RDONLY)
    for _ in range(1200):  # more than Python recurses
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    assert files.used_bytes(1 << 20) > 1 << 20
    files.remove()
    assert not files.work.exists()
    files.remove()


OWNER = """
import sys
from rlhub.sandboxes.workspace import Workspace
mine = Workspace("box")
print(mine.name, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_and_what_a_live_one_has_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    command, env = [sys.executable, "-c", OWNER], {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as owner:
        assert owner.stdout is not None
        left, mine = tmp_path / owner.stdout.readline().strip(), Workspace("box")
        (tmp_path / "rlhub-box-new").mkdir()  # of one that comes to its lock only now
        asked: list[str] = []
        remove_left("box", lambda name: bool(asked.append(name)))
        assert left.is_dir() and asked == [], "the control: its owner lives"
        owner.kill()
    remove_left("box", lambda name: bool(asked.append(name)))
    assert left.is_dir() and asked == [left.name], "there is more of it, which is not gone"
    remove_left("other", lambda name: True)
    assert left.is_dir(), "another kind of sandbox does not know what else there is of it"
    remove_left("box", lambda name: True)
    assert not left.exists() and mine.work.is_dir() and (tmp_path / "rlhub-box-new").is_dir()
    mine.remove()
    mine.remove()
