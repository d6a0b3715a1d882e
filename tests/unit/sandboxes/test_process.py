"""Where control groups are made, and with which bounds, over folders that look like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhub.sandboxes import process
from rlhub.sandboxes.base import SandboxError, SandboxLimits
from rlhub.sandboxes.process import Cgroup, Parents, find_parents, remove_groups

LIMITS = SandboxLimits(memory_gb=1.0, processes=10)


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"cgroup.procs": "", **{name.replace("__", "."): text for name, text in files.items()}}.items():
        (folder / name).write_text(text)
    return folder


def test_version_1_is_below_the_processs_own_groups(tmp_path: Path) -> None:
    memory, pids = group(tmp_path / "memory/mine"), group(tmp_path / "pids")
    found = find_parents(tmp_path, "8:pids:/\n4:memory:/mine\n0::/")
    assert found is not None and (found.version, found.folders) == (1, (memory, pids))


def test_version_2_is_below_the_nearest_group_that_passes_both_on(tmp_path: Path) -> None:
    group(tmp_path, cgroup__subtree_control="memory pids cpu")
    group(tmp_path / "user", cgroup__subtree_control="cpu memory pids")
    group(tmp_path / "user/session", cgroup__subtree_control="")
    found = find_parents(tmp_path, "0::/user/session")
    assert found is not None and (found.version, found.folders) == (2, (tmp_path / "user",))


@pytest.mark.parametrize("own", ["", "0::/away", "4:memory:/mine\n3:pids:/mine"])
def test_no_group_where_none_can_be_made(tmp_path: Path, own: str) -> None:
    assert find_parents(tmp_path, own) is None


def test_the_bounds_of_version_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = {}
    monkeypatch.setattr(process, "_write", lambda folder, values: written.update(values))
    group(tmp_path, cgroup__subtree_control="memory pids")
    parents = find_parents(tmp_path, "0::/")
    assert parents is not None
    made = Cgroup(parents, "one", LIMITS)
    assert written == {"memory.max": 1 << 30, "memory.swap.max": 0, "memory.oom.group": 1, "pids.max": 15}
    assert made.entries == [str(tmp_path / "one/cgroup.procs")]
    (tmp_path / "one/memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    assert made.num_killed == 2
    (tmp_path / "one/memory.events").unlink()
    made.remove()
    assert not (tmp_path / "one").exists()


def test_a_group_that_exists_is_an_error(tmp_path: Path) -> None:
    group(tmp_path, cgroup__subtree_control="memory pids")
    parents = find_parents(tmp_path, "0::/")
    assert parents is not None
    (tmp_path / "one").mkdir()
    with pytest.raises(SandboxError):
        Cgroup(parents, "one", LIMITS)


def test_the_groups_of_one_sandbox_are_removed(tmp_path: Path) -> None:
    parents = Parents(version=1, folders=(tmp_path / "memory", tmp_path / "pids"))
    for folder in parents.folders:
        for name in ("one-1", "one-2", "other-1"):
            (folder / name).mkdir(parents=True)
    busy = tmp_path / "pids/one-2/cgroup.procs"  # a folder that is not empty cannot be removed, as a group with processes
    busy.touch()
    assert not remove_groups(parents, "one")
    assert {path.name for path in tmp_path.glob("*/*")} == {"one-2", "other-1"}
    busy.unlink()
    assert remove_groups(parents, "one") and remove_groups(None, "one")
    assert {path.name for path in tmp_path.glob("*/*")} == {"other-1"}
