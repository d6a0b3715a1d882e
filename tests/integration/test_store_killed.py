"""kill -9 at every single file operation of a save leaves a loadable checkpoint, and the next save works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhub.checkpoint.files import write_file
from rlhub.checkpoint.store import CheckpointStore


def try_all_points(scenario: str, store: str, folder: Path) -> dict[str, Any]:
    program = [sys.executable, str(Path(__file__).with_name("kill_points.py")), scenario, store, str(folder)]
    return json.loads(subprocess.run(program, stdout=subprocess.PIPE, check=True, timeout=600).stdout)


@pytest.mark.parametrize("scenario", ["next_step", "same_step_again"])
def test_a_kill_anywhere_leaves_a_loadable_state(tmp_path: Path, scenario: str) -> None:
    found = try_all_points(scenario, "CheckpointStore", tmp_path)
    assert found["points"] > 40, "the profiler no longer sees the file operations"
    assert found["violations"] == []


@pytest.mark.parametrize("broken", ["DeletesFirst", "ClearsTheWay"])
def test_the_check_notices_a_store_with_a_gap(tmp_path: Path, broken: str) -> None:
    assert try_all_points("same_step_again", broken, tmp_path)["violations"]


def test_everything_is_on_the_disk_before_the_folder_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against power loss: every file and folder of the checkpoint is flushed before the rename, the parent after it."""
    flushed: set[str] = set()
    at_rename: set[str] = set()
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        flushed.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        real_replace(source, target)
        if str(source) in flushed:
            flushed.add(str(target))
        if Path(target).name == "global_step_1":
            at_rename.update(flushed)
            flushed.clear()

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    store = CheckpointStore(tmp_path)
    aside = store.begin(1)
    (aside / "actor" / "huggingface").mkdir(parents=True)
    (aside / "actor" / "huggingface" / "config.json").write_text("{}")
    path = store.commit(1, [write_file(aside / "actor" / "x.bin", b"1")], {})
    needed = {str(aside)} | {str(aside / child.relative_to(path)) for child in path.rglob("*")}
    assert needed <= at_rename and str(tmp_path) in flushed
