"""A program: kill a save with SIGKILL before each of its file operations in turn, and say what was found afterwards.

    python kill_points.py <scenario> <store class> <empty folder>

A forked child runs the scenario under a profiler that counts file operations and kills it before the n-th; every n is
tried.  `os.write` takes only half of what it is given, so files are also torn in the middle.  Prints JSON: the number of
points and a list of violations.  A program of its own, because forking a process that has loaded torch is slow.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from rlhub.checkpoint.files import write_file
from rlhub.checkpoint.store import POINTER, CheckpointStore
from rlhub.errors import CheckpointError

OPERATIONS = {"open", "write", "close", "replace", "rename", "mkdir", "unlink", "remove", "rmdir", "truncate", "ftruncate"}
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


class DeletesFirst(CheckpointStore):
    """A control: removes the old folder before the new one is in place."""

    def _publish(self, aside: Path, final: Path) -> None:
        if final.exists():
            shutil.rmtree(final)
        os.replace(aside, final)


class ClearsTheWay(CheckpointStore):
    """A control: deletes the old checkpoint of the step when the new save begins."""

    def begin(self, step: int) -> Path:
        shutil.rmtree(self.folder(step), ignore_errors=True)
        return super().begin(step)


SCENARIOS: dict[str, Scenario] = {"next_step": next_step, "same_step_again": same_step_again}
STORES: dict[str, type[CheckpointStore]] = {cls.__name__: cls for cls in (CheckpointStore, DeletesFirst, ClearsTheWay)}


def run_until(count: int, scenario: Scenario, store: CheckpointStore) -> bool:
    """Run the scenario in a child that dies before its `count`-th file operation; True when it got to the end."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    left = count
    write = os.write
    os.write = lambda descriptor, data: write(descriptor, data[: max(1, len(data) // 2)])  # type: ignore[assignment]

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


def violation(run: Path, make: type[CheckpointStore], *, finished: bool, seen: set[str]) -> str | None:
    """What is wrong with the run folder of a killed (or finished) save, or None; then saves once more into it."""
    try:
        latest = make(run).latest()
        text = latest.state["text"] if latest else "nothing"
        if text not in ("first", "second") or (finished and text != "second"):
            return f"found {text}"
        if "second" in seen and text == "first":
            return "went back to the first"
        seen.add(text)
        next_step(make(run))
    except CheckpointError as error:
        return str(error)
    after = sorted(path.name for path in run.iterdir())
    return None if after == ["global_step_2", POINTER] else f"the next save left {after}"


def main(scenario: str, store: str, root: Path) -> None:
    os.fsync = lambda descriptor: None  # type: ignore[assignment]  # what a killed process wrote is in the page cache
    make = STORES[store]
    save(make(root / "pristine"), 1, "first")
    violations, seen, finished, count = [], {"first"}, False, 0
    while not finished and not (violations and store != "CheckpointStore"):
        count += 1
        run = root / "run"
        shutil.copytree(root / "pristine", run)
        finished = run_until(count, SCENARIOS[scenario], make(run))
        if found := violation(run, make, finished=finished, seen=seen):
            violations.append(f"killed before operation {count}: {found}")
        shutil.rmtree(run)
    sys.stdout.write(json.dumps({"points": count, "violations": violations}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
