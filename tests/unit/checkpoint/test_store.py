"""CheckpointStore: what counts as a checkpoint, what is skipped and why, what is kept."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlhub.checkpoint.files import write_file
from rlhub.checkpoint.store import POINTER, Checkpoint, CheckpointStore, open_checkpoint
from rlhub.errors import CheckpointError


def save(store: CheckpointStore, step: int, *, text: str = "", metrics: Mapping[str, float] | None = None) -> Path:
    aside = store.begin(step)
    (aside / "actor").mkdir()
    entries = [write_file(aside / "actor" / f"shards-{rank}.bin", f"{step} {rank} {text}".encode() * 50) for rank in range(2)]
    (aside / "actor" / "tokenizer.json").write_text(f"tokenizer {step}")
    return store.commit(step, entries, {"global_step": step, "pi": 3.141592653589793, "text": text}, metrics=metrics)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def latest(store: CheckpointStore) -> Checkpoint:
    found = store.latest()
    assert found is not None
    return found


def test_saves_and_finds_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    assert store.latest() is None and store.steps() == []
    assert save(store, 5) == tmp_path / "run" / "global_step_5"
    save(store, 10, metrics={"val/pass@1": 0.5})
    found = latest(CheckpointStore(tmp_path / "run"))
    assert (found.step, found.path, found.metrics) == (10, tmp_path / "run" / "global_step_10", {"val/pass@1": 0.5})
    assert found.state == {"global_step": 10, "pi": 3.141592653589793, "text": ""}
    assert names(tmp_path / "run") == ["global_step_10", "global_step_5", POINTER]
    assert (tmp_path / "run" / POINTER).read_text() == "10\n"


def test_the_manifest_lists_every_file(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 1)
    listed = {row["path"]: row for row in json.loads((path / "manifest.json").read_text())["files"]}
    assert set(listed) == {"actor/shards-0.bin", "actor/shards-1.bin", "actor/tokenizer.json", "trainer.json"}
    assert all((path / name).stat().st_size == row["size"] for name, row in listed.items())


DAMAGE = {
    "bit flip": lambda path: flip(path / "actor" / "shards-1.bin"),
    "truncated": lambda path: os.truncate(path / "actor" / "shards-1.bin", 3),
    "empty": lambda path: os.truncate(path / "actor" / "shards-1.bin", 0),
    "missing file": lambda path: (path / "actor" / "shards-1.bin").unlink(),
    "sidecar changed": lambda path: (path / "actor" / "tokenizer.json").write_text("tokenizer X"),
    "state changed": lambda path: (path / "trainer.json").write_text("{}"),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "half a manifest": lambda path: os.truncate(path / "manifest.json", 40),
    "no JSON object": lambda path: (path / "manifest.json").write_text("[1]"),
    "step changed": lambda path: edit_manifest(path, lambda value: value.update(step=5)),
    "size changed": lambda path: edit_manifest(path, lambda value: value["files"][0].update(size=7)),
    "checksum removed": lambda path: edit_manifest(path, lambda value: value.pop("checksum")),
    "older format with a checksum": lambda path: edit_manifest(path, lambda value: value.update(version=1)),
    "other format": lambda path: (path / "manifest.json").write_text('{"version": 99}'),
}
IN_A_SHARD = ("bit flip", "truncated", "empty", "missing file")
NAMED = {"sidecar changed": "tokenizer.json", "state changed": "trainer.json"}


def edit_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads((path / "manifest.json").read_text())
    change(value)
    (path / "manifest.json").write_text(json.dumps(value))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = save(store, 2)
    DAMAGE[kind](path)
    with caplog.at_level(logging.WARNING):
        assert latest(store).step == 1
    file = NAMED.get(kind, "shards-1.bin" if kind in IN_A_SHARD else "manifest")
    assert "global_step_2" in caplog.text and file in caplog.text
    with pytest.raises(CheckpointError, match=r"global_step_2"):
        open_checkpoint(path)
    save(store, 2, text="again")  # the damaged folder can be replaced
    assert latest(store).state["text"] == "again"


def test_a_bit_flip_passes_only_without_verification(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    flip(save(store, 1) / "actor" / "shards-0.bin")
    assert store.latest() is None
    quick = store.latest(verify=False)
    assert quick is not None and quick.step == 1


def test_a_changed_step_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 2)
    edit_manifest(path, lambda value: value.update(step=5))
    with pytest.raises(CheckpointError, match=r"global_step_2/manifest.json has another checksum.*use another checkpoint"):
        open_checkpoint(path)


def test_a_manifest_laid_out_anew_is_the_same(tmp_path: Path) -> None:
    path = save(CheckpointStore(tmp_path), 2, metrics={"val/pass@1": 1 / 3})
    (path / "manifest.json").write_text(json.dumps(json.loads((path / "manifest.json").read_text()), indent=4, sort_keys=True))
    assert open_checkpoint(path).metrics == {"val/pass@1": 1 / 3}


def test_a_checkpoint_of_the_format_without_a_checksum_still_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 2)
    assert open_checkpoint(path).step == 2 and not caplog.text

    def older(value: dict[str, Any]) -> None:
        value["version"] = 1
        del value["checksum"]

    edit_manifest(path, older)
    assert latest(store).step == latest(store).step == 2
    assert caplog.text.count("older format without a checksum") == 1


def test_a_pointer_that_is_a_folder_does_not_matter_to_who_reads(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / POINTER).unlink()
    (tmp_path / POINTER).mkdir()
    assert latest(store).step == 1


def test_pointer_to_a_missing_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 3)
    for text in ("7\n", "", "not a number", "../x"):
        (tmp_path / POINTER).write_text(text)
        caplog.clear()
        assert latest(store).step == 3
        assert "no such checkpoint" in caplog.text
    (tmp_path / POINTER).unlink()
    assert latest(store).step == 3


def test_going_back_makes_the_new_branch_the_latest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step, text="old")
    save(store, 2, text="new")  # resumed from step 1
    found = latest(store)
    assert (found.step, found.state["text"]) == (2, "new")
    assert store.retain(1) == [1, 3]


def test_interrupted_saves_are_invisible_and_cleared(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (store.begin(2) / "half").write_text("x")
    assert latest(store).step == 1 and store.steps() == [1]
    save(store, 4)
    assert names(tmp_path) == ["global_step_1", "global_step_4", POINTER]


def test_files_the_driver_cannot_see_are_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run")
    aside = store.begin(1)
    entry = write_file(aside / "x.bin", b"123")
    (aside / "x.bin").unlink()
    with pytest.raises(CheckpointError, match="file system that all nodes share"):
        store.commit(1, [entry], {})
    outside = write_file(tmp_path / "elsewhere.bin", b"123")
    with pytest.raises(CheckpointError, match="not below"):
        store.commit(1, [outside], {})
    with pytest.raises(CheckpointError, match="begin"):
        store.commit(9, [], {})
    assert store.latest() is None


def test_disk_full_and_read_only_places_are_clear_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def full(descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(store, 2)
        aside = store.begin(2)
        with pytest.raises(CheckpointError, match="No space left on device"):
            store.commit(2, [], {"x": 1})
        assert aside.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="default_local_dir"):
        CheckpointStore(tmp_path / "file" / "run").begin(1)
    assert latest(store).step == 1


def test_open_says_what_to_give(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    assert store.open(Path("global_step_1")).step == 1
    with pytest.raises(CheckpointError, match="is a run folder.* global_step_1"):
        store.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        store.open(tmp_path / "global_step_7")


def test_retains_newest_and_best(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step, score in ((1, 0.2), (2, 0.9), (3, 0.4), (4, float("nan"))):
        save(store, step, metrics={"val/pass@1": score})
    assert store.retain(None) == []
    assert store.best("val/pass@1") == 2 and store.best("val/pass@1", higher_is_better=False) == 1 and store.best("x") is None
    assert store.retain(1, "val/pass@1") == [1, 3]
    assert store.steps() == [2, 4]
    store.note_metrics(4, {"val/pass@1": 0.95})
    assert store.best("val/pass@1") == 4 and latest(store).step == 4
    assert store.retain(1, "val/pass@1") == [2]
    assert names(tmp_path) == ["global_step_4", POINTER]


def test_the_newest_known_to_be_finite_is_never_deleted(tmp_path: Path) -> None:
    """Whatever was saved after it by who did not test."""
    store = CheckpointStore(tmp_path)
    for step, finite in ((1, True), (2, True), (3, False), (4, False)):
        store.begin(step)
        store.commit(step, [], {}, finite=finite)
    assert store.retain(1) == [1, 3]
    assert store.steps() == [2, 4]
    store.begin(5)
    store.commit(5, [], {}, finite=True)
    assert store.retain(1) == [2, 4]


@pytest.mark.parametrize("kind", DAMAGE)
def test_the_only_good_one_is_never_deleted(tmp_path: Path, kind: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    save(store, 2)
    DAMAGE[kind](tmp_path / "global_step_2")
    assert store.retain(1) == []
    assert latest(store).step == 1
    save(store, 3)
    assert store.retain(1) == [1] if "manifest" in kind or kind in ("no JSON object", "other format") else [1, 2]
    assert latest(store).step == 3


def test_everything_damaged_deletes_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        flip(save(store, step) / "actor" / "shards-0.bin")
    assert store.retain(1) == [] and store.steps() == [1, 2, 3]


def test_a_moved_run_folder_still_loads(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path / "a"), 1)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert latest(CheckpointStore(tmp_path / "b")).path == tmp_path / "b" / "global_step_1"
