"""Files are whole or not there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rlhub.utils import atomic


def test_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic.write_json(path, {"x": 1})
    atomic.write_json(path, {"x": "zwölf"})
    assert path.read_text(encoding="utf-8") == '{\n "x": "zwölf"\n}\n'
    assert [child.name for child in tmp_path.iterdir()] == ["a.json"]


def test_a_failing_write_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    atomic.write_text(path, "old")

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        atomic.write_text(path, "new")
    assert path.read_text() == "old"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    atomic.write_bytes(tmp_path / "a", b"0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"


def test_content_reaches_the_disk_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        events.append("fsync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        events.append(f"rename {target.name}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    atomic.write_bytes(tmp_path / "a", b"x")
    assert events == ["fsync a.part", "rename a", f"fsync {tmp_path.name}"]


def test_a_file_for_its_owner_alone_is_never_readable_by_others(tmp_path: Path) -> None:
    """Nor where a killed write has left a part that was."""
    file = tmp_path / "config.yaml"
    for path in (file, file.with_name(file.name + atomic.TEMPORARY_SUFFIX)):
        path.write_text("old")
        path.chmod(0o644)
    atomic.write_text(file, "new", mode=0o600)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.read_text() == "new"
