"""kill -9 at every single file operation of a save leaves a loadable checkpoint, and the next save works.

A forked child runs the scenario under a profiler that counts file operations and kills the child with SIGKILL before the
n-th; every n is tried.  `os.write` takes only half of what it is given, so files are also torn in the middle.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from rlhub.checkpoint.files import write_file
from rlhub.checkpoint.store import POINTER, CheckpointStore
from rlhub.errors import CheckpointError

OPERATIONS = {"open", "write", "close", "replace", "rename", "mkdir", "unlink", "remove", "rmdir", "truncate", "ftruncate", "fsync"}
Scenario = Callable[[CheckpointStore], None]


def save(store: CheckpointStore, step: int, text: str) -> None:
    aside = store.begin(step)
    entries = [write_file(aside / f"shards-{rank}.bin", f"{text} {rank}".encode()) for rank in range(2)]
    (aside / "tokenizer.json").write_bytes(text.encode())
    store.commit(step, entries, {"text": text})


def next_step(store: CheckpointStore) -> None:
    save(store, 2, "second")
    store.retain(1)


def same_step_again(store: CheckpointStore) -> None:
    save(store, 1, "second")


def run_until(count: int, scenario: Scenario, store: CheckpointStore) -> bool:
    """Run the scenario in a child that dies before its `count`-th file operation; True when it got to the end."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    left = count
    write = os.write
    os.write = lambda descriptor, data: write(descriptor, data[: max(1, len(data) // 2)])  # type: ignore[assignment]
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # page cache outlives a killed process: only slow here

    def before_call(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if event == "c_call" and argument.__name__ in OPERATIONS:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.setprofile(before_call)
        scenario(store)
        os._exit(0)
    finally:
        os._exit(1)


def violations(
    scenario: Scenario, root: Path, make: Callable[[Path], CheckpointStore], *, stop_at_first: bool = False
) -> tuple[list[str], int]:
    """Try every kill point; returns what went wrong and how many points were tried."""
    found: list[str] = []
    pristine = root / "pristine"
    save(make(pristine), 1, "first")
    seen = {"first"}
    for count in range(1, 1000):
        run = root / "run"
        shutil.copytree(pristine, run)
        finished = run_until(count, scenario, make(run))
        try:
            latest = make(run).latest()
            text = latest.state["text"] if latest else "nothing"
            if text not in ("first", "second") or (finished and text != "second"):
                found.append(f"killed before operation {count}: found {text}")
            elif "second" in seen and text == "first":
                found.append(f"killed before operation {count}: went back to the first")
            seen.add(text)
            next_step(make(run))
            after = sorted(path.name for path in run.iterdir())
            if after != ["global_step_2", POINTER]:
                found.append(f"killed before operation {count}: the next save left {after}")
        except CheckpointError as error:
            found.append(f"killed before operation {count}: {error}")
        shutil.rmtree(run)
        if finished or (found and stop_at_first):
            return found, count
    raise AssertionError("the scenario never finished")


@pytest.mark.parametrize("scenario", [next_step, same_step_again])
def test_a_kill_anywhere_leaves_a_loadable_state(tmp_path: Path, scenario: Scenario) -> None:
    found, points = violations(scenario, tmp_path, CheckpointStore)
    assert points > 40, "the profiler no longer sees the file operations"
    assert found == []


class DeletesFirst(CheckpointStore):
    """Removes the old folder before the new one is in place."""

    def _publish(self, aside: Path, final: Path) -> None:
        if final.exists():
            shutil.rmtree(final)
        os.replace(aside, final)


class ClearsTheWay(CheckpointStore):
    """Deletes the old checkpoint of the step when the new save begins."""

    def begin(self, step: int) -> Path:
        shutil.rmtree(self.folder(step), ignore_errors=True)
        return super().begin(step)


@pytest.mark.parametrize("broken", [DeletesFirst, ClearsTheWay])
def test_the_check_notices_a_store_with_a_gap(tmp_path: Path, broken: type[CheckpointStore]) -> None:
    assert violations(same_step_again, tmp_path, broken, stop_at_first=True)[0]


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
        if Path(target).name == "manifest.json":
            flushed.add(str(target))  # flushed under its temporary name
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
