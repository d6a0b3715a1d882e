"""CheckpointStore: the checkpoints of a run folder, saved so that a kill at any moment leaves a loadable one.

    unfinished = store.begin(step)               # a hidden folder; workers write their shards and weights into it
    store.commit(step, entries, state)           # manifest, flush, rename to global_step_<n>, latest pointer
    store.retain(max_to_keep=2, best_metric="val/pass@1")
    checkpoint = store.latest()                  # on resume: the newest whole one; damaged ones are named and skipped

One process (the driver) uses a store; workers only get the folder that `begin` returned.  A folder counts once it has its
final name and a manifest whose files are all present.  Nothing else is trusted, in particular not the latest pointer, which is
there for people and other programs.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhub.checkpoint.files import FileEntry, entry_of, storage_errors, write_file
from rlhub.checkpoint.manifest import MANIFEST, STATE, Manifest, problems_in, read_manifest, read_state, write_manifest
from rlhub.errors import CheckpointError
from rlhub.utils import faults
from rlhub.utils.atomic import TEMPORARY_SUFFIX, fsync_file, fsync_folder, write_text

logger = logging.getLogger(__name__)

PREFIX = "global_step_"
POINTER = "latest_checkpointed_iteration.txt"  # the usual name in RL frameworks
ASIDE = ".saving_"
REPLACED = ".replaced_"
DELETING = ".deleting_"


@dataclass(slots=True, kw_only=True, frozen=True)
class Checkpoint:
    """A whole checkpoint.

    path: its folder.
    step: its last finished step.
    state: the state that the trainer gave to `commit`.
    metrics: the metrics that it is ranked by.
    """

    path: Path
    step: int
    state: dict[str, Any]
    metrics: dict[str, float]


@dataclass(slots=True, kw_only=True)
class _Found:
    """A checkpoint folder with a readable manifest."""

    path: Path
    manifest: Manifest


def open_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """Loads the checkpoint in folder `path`.  Raises CheckpointError naming every damaged file and the remedy.

    verify: True reads every byte and compares checksums.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a {PREFIX}<n> folder of a run")
    if not (path / MANIFEST).exists() and (inside := sorted(child.name for child in path.glob(PREFIX + "*"))):
        raise CheckpointError(f"{path} is a run folder, not a checkpoint; give one of its {', '.join(inside)}")
    manifest = read_manifest(path)
    if problems := problems_in(path, manifest, verify=verify):
        raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}. Use an earlier checkpoint")
    return Checkpoint(path=path, step=manifest.step, state=read_state(path), metrics=manifest.metrics)


class CheckpointStore:
    """The checkpoints of the run folder `root`; see the module docstring.  Nothing is created before `begin`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def folder(self, step: int) -> Path:
        """Returns the folder of the checkpoint of `step`, whether it exists or not."""
        return self.root / f"{PREFIX}{step}"

    def begin(self, step: int) -> Path:
        """Deletes the files of an interrupted save; returns a new empty folder for the files of `step`, as an absolute path."""
        unfinished = self.root / f"{ASIDE}{PREFIX}{step}"
        with storage_errors(f"starting to save step {step}"):
            self.root.mkdir(parents=True, exist_ok=True)
            self._settle()
            unfinished.mkdir()
        return unfinished

    def _settle(self) -> None:
        """Completes or undoes the renames that a killed process has left half done."""
        for path in self.root.glob(REPLACED + PREFIX + "*"):
            final = self.root / path.name.removeprefix(REPLACED)
            if not final.exists():
                os.replace(path, final)
        for prefix in (ASIDE, DELETING, REPLACED):
            for path in self.root.glob(prefix + PREFIX + "*"):
                shutil.rmtree(path)

    def commit(
        self,
        step: int,
        files: Iterable[FileEntry],
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        finite: bool = False,
    ) -> Path:
        """Turns the folder that `begin(step)` returned into the checkpoint of `step`; returns its final path.

        An existing checkpoint of the same step is replaced.  Raises CheckpointError if the file of an entry does not exist
        here or has another size, because ranks wrote to folders of their own.

        files: the entries that the writers (`write_shards`, `write_hf_weights`) returned on every rank.  Any other file of the
            folder (tokenizer, configs) is read, flushed and listed too.
        state: JSON-able; returned as `Checkpoint.state`.
        metrics: the metrics that `retain(best_metric=...)` ranks by.
        finite: True if the writers have checked that all weights in the files are finite.
        """
        unfinished = self.root / f"{ASIDE}{PREFIX}{step}"
        with storage_errors(f"saving step {step}"):
            listed = self._entries(unfinished, files)
            text = json.dumps(dict(state), ensure_ascii=False).encode("utf-8")
            listed.append(_relative(unfinished, write_file(unfinished / STATE, text)))
            for folder in [unfinished, *(path for path in unfinished.rglob("*") if path.is_dir())]:
                fsync_folder(folder)
            manifest = Manifest(step=step, serial=self._next_serial(), files=listed, metrics=dict(metrics or {}), finite=finite)
            write_manifest(unfinished, manifest)
            self._publish(unfinished, self.folder(step))
            write_text(self.root / POINTER, f"{step}\n")
        faults.at("checkpoint.committed", path=self.folder(step))
        return self.folder(step)

    def _entries(self, unfinished: Path, files: Iterable[FileEntry]) -> list[FileEntry]:
        if not unfinished.is_dir():
            raise CheckpointError(
                f"{unfinished}: no such folder; call begin({unfinished.name.removeprefix(ASIDE + PREFIX)}) first"
            )
        listed = {}
        for entry in (_relative(unfinished, entry) for entry in files):
            path = unfinished / entry.path
            if not path.exists() or path.stat().st_size != entry.size:
                raise CheckpointError(
                    f"{path}: written by a worker, but the driver does not find it whole; "
                    "trainer.default_local_dir must be on a file system that all nodes share"
                )
            listed[entry.path] = entry
        for path in sorted(unfinished.rglob("*")):
            name = path.relative_to(unfinished).as_posix()
            if name in listed or not path.is_file() or name in (STATE, MANIFEST) or name.endswith(TEMPORARY_SUFFIX):
                continue
            fsync_file(path)
            listed[name] = _relative(unfinished, entry_of(path))
        return [listed[name] for name in sorted(listed)]

    def _next_serial(self) -> int:
        return 1 + max((found.manifest.serial for found in self._found(warn=False)), default=0)

    def _publish(self, unfinished: Path, final: Path) -> None:
        replaced = self.root / (REPLACED + final.name)
        if final.exists():
            os.replace(final, replaced)
        os.replace(unfinished, final)
        fsync_folder(self.root)
        if replaced.exists():
            shutil.rmtree(replaced)

    def _found(self, *, warn: bool) -> list[_Found]:
        """Returns the checkpoints with a readable manifest, newest first.  One that is being replaced counts until its
        successor is in place."""
        found = []
        for path in self.candidates():
            try:
                found.append(_Found(path=path, manifest=read_manifest(path)))
            except CheckpointError as error:
                if warn:
                    logger.warning("checkpoint skipped: %s", error)
        return sorted(found, key=lambda one: (one.manifest.serial, one.manifest.step), reverse=True)

    def candidates(self) -> list[Path]:
        """Returns the folders whose names are those of checkpoints, whole or not."""
        paths = {path.name: path for path in self.root.glob(PREFIX + "*")}
        for path in self.root.glob(REPLACED + PREFIX + "*"):
            paths.setdefault(path.name.removeprefix(REPLACED), path)
        return list(paths.values())

    def latest(self, *, verify: bool = True) -> Checkpoint | None:
        """Returns the newest whole checkpoint, or None.  A warning names file and cause of each damaged one that is skipped.

        It changes nothing on disk, so other programs may call it while a run saves.
        """
        self._check_pointer()
        for found in self._found(warn=True):
            try:
                return open_checkpoint(found.path, verify=verify)
            except CheckpointError as error:
                logger.warning("checkpoint skipped: %s", error)
        return None

    def _check_pointer(self) -> None:
        pointer = self.root / POINTER
        if not pointer.is_file():
            return
        step = pointer.read_text(encoding="utf-8", errors="replace").strip()
        if not (self.root / f"{PREFIX}{step}").is_dir():
            logger.warning("%s names step %s, but there is no such checkpoint; looking for the newest whole one", pointer, step)

    def open(self, path: Path, *, verify: bool = True) -> Checkpoint:
        """Opens the checkpoint in the folder that `find` returns."""
        return open_checkpoint(self.find(path), verify=verify)

    def find(self, path: Path) -> Path:
        """Returns the folder that the user means: a relative path that does not exist here is looked up in the run folder."""
        inside = self.root / path
        return inside if not path.exists() and inside.exists() else path

    def folders(self) -> list[Path]:
        """Returns the checkpoints with a readable manifest, newest first; their files may be damaged."""
        return [found.path for found in self._found(warn=False)]

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint with a readable manifest, ascending."""
        return sorted(found.manifest.step for found in self._found(warn=False))

    def note_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds metrics that became known after the save of `step`, by a later validation of the same weights."""
        manifest = read_manifest(self.folder(step))
        manifest.metrics.update(metrics)
        with storage_errors(f"noting metrics of step {step}"):
            write_manifest(self.folder(step), manifest)

    def best(self, metric: str, *, higher_is_better: bool = True) -> int | None:
        """Returns the step whose checkpoint has the best `metric`, the earliest among equals; None if none has it."""
        one = _best([found for found in self._found(warn=False) if _whole(found, verify=False)], metric, higher_is_better)
        return one.manifest.step if one else None

    def retain(
        self, max_to_keep: int | None, best_metric: str | None = None, *, higher_is_better: bool = True, verify: bool = True
    ) -> list[int]:
        """Deletes old checkpoints; returns their steps.

        It keeps the newest `max_to_keep` whole checkpoints, the best by `best_metric`, and the newest one that is known to be
        finite.  max_to_keep=None keeps all.  Damaged checkpoints do not count.  Before anything is deleted, the newest
        remaining one is read back and compared with its checksums (verify=True), so the only good one is never deleted.
        """
        if max_to_keep is None:
            return []
        if max_to_keep < 1:
            raise CheckpointError(f"max_to_keep must be at least 1, got {max_to_keep}")
        found = self._found(warn=False)
        whole = [one for one in found if _whole(one, verify=False)]
        if len(whole) <= max_to_keep:
            return []
        while verify and whole and not _whole(whole[0], verify=True):
            whole.pop(0)
        remaining = whole[:max_to_keep]
        if best_metric is not None and (best := _best(whole, best_metric, higher_is_better)):
            remaining.append(best)
        remaining += [one for one in whole if one.manifest.finite][:1]
        if not remaining:
            return []
        # Damaged ones newer than the newest good one stay for people to look at.
        doomed = [one for one in found if one not in remaining and one.manifest.serial < remaining[0].manifest.serial]
        for one in doomed:
            self._delete(one.path)
        return sorted(one.manifest.step for one in doomed)

    def _delete(self, path: Path) -> None:
        """Deletes a checkpoint, after a rename: a half-deleted folder must not look like a checkpoint."""
        with storage_errors(f"deleting {path}"):
            going = self.root / f"{DELETING}{path.name.removeprefix(REPLACED)}"
            if going.exists():
                shutil.rmtree(going)
            os.replace(path, going)
            shutil.rmtree(going)


def _relative(unfinished: Path, entry: FileEntry) -> FileEntry:
    path = Path(entry.path)
    if path.is_absolute():
        try:
            path = path.relative_to(unfinished)
        except ValueError:
            raise CheckpointError(f"{path} is not below {unfinished}: it would not be part of the checkpoint") from None
    return FileEntry(path=path.as_posix(), size=entry.size, checksum=entry.checksum)


def _whole(found: _Found, *, verify: bool) -> bool:
    problems = problems_in(found.path, found.manifest, verify=verify)
    for problem in problems:
        logger.warning("checkpoint %s is damaged: %s", found.path, problem)
    return not problems


def _best(candidates: list[_Found], metric: str, higher_is_better: bool) -> _Found | None:
    ranked = [one for one in candidates if metric in one.manifest.metrics]
    sign = 1 if higher_is_better else -1
    return max(ranked, key=lambda one: (sign * one.manifest.metrics[metric], -one.manifest.serial), default=None)
