from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from rlhub.agents.remote.trajectory_store import RowRequest, trajectories_of, wide_names
from rlhub.agents.trajectory import Episode, Trajectory, TrajectoryRef
from rlhub.errors import DataError, DeadlineError
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem
from rlhub.rollout_service.trajectory_files import TrajectoryReader, TrajectoryWriter, encode
from rlhub.rollout_service.trajectory_rows import CollectedRows

ROOT = Path(__file__).resolve().parents[3]


def group(ordinal: int, version: int = 0) -> Group:
    trajectories = [
        Trajectory(
            prompt_ids=[1, 2],
            response_ids=[ordinal, 4, sample],
            response_mask=[1, 0, 1],
            rollout_log_probs=[-0.25, 0.0, -0.5],  # as float32 has them
            versions=[version, -1, version + 1],
            rewards=[0.0, 0.0, 1.5] if sample else None,
            metrics={"turns": 2.0},
        )
        for sample in range(2)
    ]
    row = {"ground_truth": "4", "extra_info": {"index": np.int64(ordinal)}, "raw_prompt": np.array(["a"], dtype=object)}
    return Group(item=PromptItem(prompt_ids=(1, 2), ordinal=ordinal, row=row), trajectories=trajectories)


def tokens_of(groups: list[Group], url: str) -> list[Trajectory]:
    """Reads the tokens of all samples from the files."""
    found = []
    for row in (row for one in groups for row in one.rows):
        assert isinstance(row, TrajectoryRef)
        data = CollectedRows(url, row.home, RowRequest.of([row], wide_names([row])), 100).read()
        found += trajectories_of([row], data)
    return found


def firsts(groups: list[Group], folder: Path) -> list[int]:
    return [tokens_of([one], str(folder))[0].response_ids[0] for one in groups]


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_what_is_read_is_what_was_written(where: str, tmp_path: Path) -> None:
    url = str(tmp_path / "t") if where == "disk" else f"memory://{tmp_path.name}"
    writer = TrajectoryWriter(url)
    writer.write([group(0), group(1)])
    writer.write([group(2)])
    reader = TrajectoryReader(url)
    read = reader.next_groups(3, timeout=60)
    assert tokens_of(read, reader.url) == [row for index in range(3) for row in group(index).whole]
    assert read[2].item.row == {"ground_truth": "4", "extra_info": {"index": 2}, "raw_prompt": ["a"]}
    assert [one.ordinal for one in read] == [0, 1, 2]
    with pytest.raises(DeadlineError, match="collects still run"):
        reader.next_groups(1, timeout=0.1)


def test_an_episode_of_several_trajectories_is_read_as_one(tmp_path: Path) -> None:
    written = group(5)
    several = Episode(trajectories=group(5).whole, metrics={"turns": 2.0})
    several.set_reward(0.5)
    written.trajectories = [several, *written.trajectories]
    written.valid, written.numbers = [True] * len(written.trajectories), [{} for _ in written.trajectories]
    TrajectoryWriter(str(tmp_path)).write([written])
    (read,) = TrajectoryReader(str(tmp_path)).next_groups(1, timeout=60)
    assert tokens_of([read], str(tmp_path)) == written.whole and read.counts[0] == len(group(5).whole)
    several.trajectories[0].response_mask = [1]  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="trajectory 0 of the episode: response_mask has 1 entries"):
        encode(written, bytearray())
    with pytest.raises(ValueError, match=r"tokens of row .* are in process collector-00000000\.rows; read them first"):
        encode(read, bytearray())


def test_a_reader_waits_for_what_another_job_writes_and_ends_with_it(tmp_path: Path) -> None:
    def collect() -> None:
        writer = TrajectoryWriter(str(tmp_path))
        for index in range(3):
            time.sleep(0.05)
            writer.write([group(index)])
        writer.end()

    thread = threading.Thread(target=collect)
    thread.start()
    reader = TrajectoryReader(str(tmp_path))
    assert firsts(reader.next_groups(2, timeout=60), tmp_path) == [0, 1]
    assert firsts(reader.next_groups(2, timeout=60), tmp_path) == [2]
    assert reader.next_groups(2, timeout=60) == []
    thread.join()


def test_after_a_stop_every_group_is_trained_once(tmp_path: Path) -> None:
    """Two writers, files of three groups, steps of two; stopped after every step with the next step's groups taken."""
    one, two = TrajectoryWriter(str(tmp_path), "one"), TrajectoryWriter(str(tmp_path), "two")
    for start in range(0, 12, 6):
        one.write([group(start + index) for index in range(3)])
        two.write([group(start + index) for index in range(3, 6)])
    trained: list[int] = []
    state = TrajectoryReader(str(tmp_path)).state()
    for step in range(1, 7):
        reader = TrajectoryReader(str(tmp_path))
        reader.load_state(json.loads(json.dumps(state)))
        groups = reader.next_groups(2, timeout=60, step=step)
        assert [found.ordinal for found in groups] == [2 * step - 2, 2 * step - 1]
        if step < 6:
            reader.next_groups(2, timeout=60, step=step + 1)  # taken ahead, and lost with the process
        trained += firsts(groups, tmp_path)
        reader.trained(step)
        state = reader.state()
        assert reader.first_ordinal == 2 * step
    assert sorted(trained) == list(range(12))


def test_a_timeout_loses_nothing(tmp_path: Path) -> None:
    writer = TrajectoryWriter(str(tmp_path))
    writer.write([group(0)])
    reader = TrajectoryReader(str(tmp_path))
    with pytest.raises(DeadlineError):
        reader.next_groups(2, timeout=0.1)
    writer.write([group(1)])
    assert firsts(reader.next_groups(2, timeout=60), tmp_path) == [0, 1]


def test_a_writer_that_starts_again_goes_on_with_its_numbers(tmp_path: Path) -> None:
    assert TrajectoryWriter(str(tmp_path)).write([group(0)]) == "collector-00000000.jsonl.gz"
    assert TrajectoryWriter(str(tmp_path)).write([group(1)]) == "collector-00000001.jsonl.gz"


@pytest.mark.parametrize(("policy", "left", "masked"), [("drop", [2], 0), ("mask", [1, 2], 2), ("correct", [0, 1, 2], 0)])
def test_what_is_older_than_the_bound_follows_the_policy(tmp_path: Path, policy: str, left: list[int], masked: int) -> None:
    """At step 6 with a bound of 2 nothing before version 3 trains; tokens are of versions v and v + 1."""
    TrajectoryWriter(str(tmp_path)).write([group(0, version=1), group(1, version=2), group(2, version=3)])
    TrajectoryWriter(str(tmp_path)).end()
    reader = TrajectoryReader(str(tmp_path), max_staleness=2, stale_policy=policy)  # type: ignore[arg-type]
    found = reader.next_groups(3, step=6)
    assert firsts(found, tmp_path) == left
    metrics = reader.metrics()
    assert metrics["rollout/dropped_groups"] == 3 - len(left)
    assert metrics["rollout/masked_tokens"] == (4 + masked if policy == "mask" else 0)


def test_a_damaged_file_is_found_and_an_unfinished_one_is_not_there(tmp_path: Path) -> None:
    writer = TrajectoryWriter(str(tmp_path))
    name = writer.write([group(0)])
    (tmp_path / "collector-00000001.jsonl.gz").write_bytes(b"half")
    (tmp_path / "collector-00000001.rows").write_bytes(b"half")
    data = bytearray((tmp_path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / name).write_bytes(bytes(data))
    reader = TrajectoryReader(str(tmp_path))
    with pytest.raises(DataError, match="not what its manifest says"):
        reader.next_groups(1, timeout=60)


def test_files_of_another_format_are_refused(tmp_path: Path) -> None:
    TrajectoryWriter(str(tmp_path)).write([group(0)])
    path = tmp_path / "collector-00000000.manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with pytest.raises(DataError, match="format 1, this rlhub reads 2; collect anew"):
        TrajectoryReader(str(tmp_path)).next_groups(1, timeout=60)


KILLED = """
import os, signal, sys
from rlhub.rollout_service import trajectory_rows
from rlhub.rollout_service.trajectory_files import TrajectoryWriter
from tests.unit.rollout_service.test_trajectory_files import group

writer = TrajectoryWriter(sys.argv[1])
writer.write([group(0)])
write, left = trajectory_rows.Folder.write, int(sys.argv[2])

def dying(self, name, data):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    write(self, name, data)

trajectory_rows.Folder.write = dying
writer.write([group(1)])
"""


@pytest.mark.parametrize("files", [0, 2])
def test_what_a_killed_writer_left_is_not_there_and_the_next_goes_on(tmp_path: Path, files: int) -> None:
    """The writer dies when it has written so many of a number's three files."""
    died = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(files)], cwd=ROOT, check=False)
    assert died.returncode == -signal.SIGKILL
    reader = TrajectoryReader(str(tmp_path))
    assert firsts(reader.next_groups(1, timeout=60), tmp_path) == [0]
    with pytest.raises(DeadlineError):
        reader.next_groups(1, timeout=0.1)
    assert TrajectoryWriter(str(tmp_path)).write([group(2)]) == "collector-00000001.jsonl.gz"
    assert firsts(reader.next_groups(1, timeout=60), tmp_path) == [2]
