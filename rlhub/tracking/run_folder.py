"""RunFolder: the folder with all files of one run, and the lock that keeps a second run out.

    <default_local_dir>/
        config.yaml            resolved settings, secrets hidden      metrics.jsonl    one object per step
        report.html            the run at a glance                    generations/     sample completions
        logs/<role>-rank<r>.log                                       global_step_<n>/ checkpoints
        trace.json             the timeline, for trace viewers        trackers/<name>/ files of a tracker on this machine
        graph.svg              the graph of a step, if it is one      earlier-<k>/     an earlier run that was moved aside
        run.lock tracking.json                                admin.json       address and key of a running job's administration

Names of files that a run writes match `WRITTEN`; all other files in the folder are the user's and stay as they are.  A folder
with files but without a run is refused, since a run would write among them.

The lock is the kernel's (flock): it ends with its process, however the process ends.  It is taken on the folder itself, so that
nobody can delete the lock and take it again, and on run.lock, which names its process to people.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import psutil
import yaml

from rlhub.errors import RunFolderError
from rlhub.tracking.metrics_log import decode
from rlhub.tracking.tracker import TRACKERS_FOLDER
from rlhub.utils.atomic import write_json, write_text
from rlhub.utils.redact import redact

logger = logging.getLogger(__name__)

NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # some network file systems
NO_FOLDER_LOCK = (*NO_FLOCK, errno.EBADF, errno.EINVAL, errno.EISDIR)  # NFS locks only what is open for writing
LOCK = "run.lock"
FILES = (
    "config.yaml", "config.*.yaml", "metrics.jsonl", "prompts.jsonl", "report.html", "graph.svg", "trace.json", "tracking.json",
    "latest_checkpointed_iteration.txt", "admin.json",
)  # fmt: skip
FOLDERS = (
    "logs", "generations", "batches", "tensorboard", "wandb", TRACKERS_FOLDER, "rlhub-weights-*",
    *(f"{prefix}global_step_*" for prefix in ("", ".saving_", ".replaced_", ".deleting_")),
)  # fmt: skip
WRITTEN = (*FILES, *(f"{name}.part" for name in FILES), *FOLDERS)
"""Patterns of the names of files and folders that a run writes into its folder, without the lock."""
IGNORED = ("earlier-*", "lost+found", ".gitignore", ".gitkeep", ".DS_Store", ".nfs*")
"""Patterns of names that do not show whether a folder is a run's or the user's."""
SHOWN_NAMES = 5
"""Largest number of names in a message about a folder's content."""
OWNER_ONLY = 0o600
TRAINED_BY = frozenset(
    (
        "seed",
        "plugins",
        "pipeline",
        "critic_warmup",
        "max_staleness",
        "pipeline_depth",
        "pacing",
        "stale_policy",
        "replay_from",
        "placement",
    )
)
"""Settings of the section `trainer` that change what is learned."""
LENGTH = "optim.total_training_steps"
"""End of the keys that follow from the length of the run."""


class RunFolder:
    """The paths of a run folder, and its lock.  Call `open` (or use `with`) before writing; reading needs no lock.

    abandoned_by: the process that had the lock before, if it ended without releasing it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.abandoned_by: str | None = None
        self._folder: int | None = None
        self._lock_file: int | None = None

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def graph(self) -> Path:
        return self.path / "graph.svg"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def generations(self) -> Path:
        return self.path / "generations"

    def problem(self) -> str | None:
        """Returns the reason why no run may write here, with the remedy, or None.

        The folder may hold files but no run, or a folder under the name of a file.
        """
        try:
            inside = sorted(self.path.iterdir()) if self.path.is_dir() else []
        except OSError:
            return None  # `open` reports it
        others = [path.name for path in inside if not (path.name == LOCK or _matches(path, (*WRITTEN, *IGNORED)))]
        if not _holds_run(self.path) and (others or any(_has_files(path) for path in inside if _matches(path, WRITTEN))):
            names = [path.name for path in inside]
            more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
            return (
                f"{self.path} is not empty and holds no run (it has {', '.join(names[:SHOWN_NAMES])}{more}): a run writes, and "
                "may move, files in its folder. Set trainer.default_local_dir to an empty or a new folder, for example "
                f"{self.path / 'run'}"
            )
        for path in inside:
            wanted = "file" if _matches(path, (LOCK, *FILES)) else "folder" if _matches(path, FOLDERS) else None
            if wanted is not None and path.is_dir() != (wanted == "folder"):
                kind = "folder" if path.is_dir() else "file"
                return f"{path} is a {kind}, and a run has a {wanted} of that name there; move it away, or set another folder"
        return None

    def open(self) -> RunFolder:
        """Creates the folders and takes the lock.

        Raises RunFolderError when another run has the lock, when the folder has other files, or when it cannot be written.
        """
        if problem := self.problem():
            raise RunFolderError(f"trainer.default_local_dir: {problem}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_locks()  # before the folders, since run.lock marks the folder as a run's
            for folder in (self.logs, self.generations):
                folder.mkdir(exist_ok=True)
        except OSError as error:
            self.close()
            raise RunFolderError(
                f"cannot write to the run folder {self.path}: {error.strerror or error}; set trainer.default_local_dir to another"
            ) from error
        return self

    def _take_locks(self) -> None:
        self._folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            holder = _read_holder(self.path / LOCK)
            self._lock(self._folder, NO_FOLDER_LOCK, holder)
            self._lock_file = self._take_lock_file(holder)
        except BaseException:
            self._let_go()
            raise
        if holder:
            self.abandoned_by = f"pid {holder.get('pid')} on {holder.get('host')}"
            logger.info("%s: took over the lock of an ended run (%s)", self.path / LOCK, self.abandoned_by)

    def _take_lock_file(self, holder: Mapping[str, Any]) -> int:
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not self._lock(descriptor, NO_FLOCK, holder) and _may_be_alive(holder):
                raise self._taken(holder)
            me = {"pid": os.getpid(), "host": socket.gethostname(), "started": psutil.Process().create_time()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(me).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _lock(self, descriptor: int, impossible: Collection[int], holder: Mapping[str, Any]) -> bool:
        """Takes the lock and returns True; returns False where the file system has no such locks (errors in `impossible`)."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._taken(holder) from None
        except OSError as error:
            if error.errno not in impossible:
                raise
            return False
        return True

    def _taken(self, holder: Mapping[str, Any]) -> RunFolderError:
        return RunFolderError(
            f"another run is using {self.path} (pid {holder.get('pid', '?')} on {holder.get('host', '?')}); "
            "wait for it, end it, or set trainer.experiment_name or trainer.default_local_dir to another name"
        )

    def check(self) -> None:
        """Raises RunFolderError when the open folder is no longer at its path, because it was removed, renamed or replaced.

        A run.lock that was removed is written again.
        """
        if self._folder is None or self._lock_file is None:
            return
        mine = os.fstat(self._folder)
        if not _is_at(mine, self.path):
            where = Path(os.readlink(f"/proc/self/fd/{self._folder}"))
            happened = "was removed" if mine.st_nlink == 0 else f"was moved to {where}"
            remedy = "start the command again" if mine.st_nlink == 0 else "move it back and start the command again"
            raise RunFolderError(
                f"the run folder {self.path} {happened} while the run used it, so the run ends: nothing more could be kept of "
                f"it; {remedy}: it goes on from the newest checkpoint in the folder"
            )
        if not _is_at(os.fstat(self._lock_file), self.path / LOCK):
            logger.warning("%s was removed while the run used it; it is written again", self.path / LOCK)
            fresh = self._take_lock_file(_read_holder(self.path / LOCK))
            os.close(self._lock_file)
            self._lock_file = fresh

    def close(self) -> None:
        """Releases the lock; the folder may be opened again, also by another process."""
        if self._lock_file is not None:
            os.ftruncate(self._lock_file, 0)
        self._let_go()

    def _let_go(self) -> None:
        for descriptor in (self._lock_file, self._folder):
            if descriptor is not None:
                os.close(descriptor)
        self._lock_file = self._folder = None

    def __enter__(self) -> RunFolder:
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Writes config.yaml without secrets, readable by its owner alone.

        A different config.yaml of an earlier start is kept as config.<k>.yaml.
        """
        text = yaml.safe_dump(redact(config), sort_keys=False, allow_unicode=True, width=120)
        if self.config.exists() and (old := self.config.read_text(encoding="utf-8")) != text:
            write_text(_unused(self.path, "config.{}.yaml"), old, mode=OWNER_ONLY)
        write_text(self.config, text, mode=OWNER_ONLY)

    def changes(self, config: Mapping[str, Any]) -> list[str]:
        """Returns `key: before -> now` for each setting in which config.yaml differs from `config`; [] without a readable file.

        It leaves out settings that do not change what is learned: derived lengths, and most of the section `trainer`.
        """
        try:
            before = dict(leaves(redact(yaml.safe_load(self.config.read_text(encoding="utf-8")))))
        except (OSError, ValueError, yaml.YAMLError):
            return []
        now = dict(leaves(yaml.safe_load(yaml.safe_dump(redact(config)))))
        names = [name for name in now if name in before and _says_what_is_trained(name)]
        return [f"{name}: {before[name]} -> {now[name]}" for name in names if before[name] != now[name]]

    def note(self, name: str) -> str | None:
        """Returns a short text that an earlier start saved by `write_note` (a tracker's run id), or None."""
        return self._notes().get(name)

    def write_note(self, name: str, value: str) -> None:
        """Saves a short text for later starts in this folder."""
        write_json(self._notes_path, {**self._notes(), name: value})

    @property
    def _notes_path(self) -> Path:
        return self.path / "tracking.json"

    def _notes(self) -> dict[str, str]:
        try:
            value = json.loads(self._notes_path.read_bytes())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def set_aside(self) -> Path | None:
        """Moves the files of an earlier run into `earlier-<k>`, so that a new run can start, and returns that folder.

        Returns None where the folder has no files of a run.  The user's own files stay.  Call it after `open`.
        """
        moving = [path for path in self.path.iterdir() if _matches(path, WRITTEN)]
        if not any(map(_has_files, moving)):
            return None
        target = _unused(self.path, "earlier-{}")
        target.mkdir()
        for path in moving:
            os.replace(path, target / path.name)
        for folder in (self.logs, self.generations):
            folder.mkdir()
        return target


def _matches(path: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path.name, pattern) for pattern in patterns)


def _has_files(path: Path) -> bool:
    """Returns True for a file, and for a folder that is not empty."""
    return not path.is_dir() or any(path.iterdir())


def _holds_run(folder: Path) -> bool:
    """Returns True where a run was started: its run.lock stays when it ends.

    A run folder that was copied or cleaned up by hand is known by a checkpoint or by the first line of its metrics.
    """
    if (folder / LOCK).is_file() or any((path / "manifest.json").is_file() for path in folder.glob("global_step_*")):
        return True
    try:
        with open(folder / "metrics.jsonl", "rb") as stream:
            decode(stream.readline())
    except (OSError, ValueError):
        return False
    return True


def _is_at(mine: os.stat_result, path: Path) -> bool:
    try:
        there = path.stat()
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)


def _says_what_is_trained(name: str) -> bool:
    of_the_trainer = name.startswith("trainer.") and name.split(".")[1] not in TRAINED_BY
    return not of_the_trainer and not name.endswith(LENGTH)


def _unused(folder: Path, pattern: str) -> Path:
    number = 1
    while (folder / pattern.format(number)).exists():
        number += 1
    return folder / pattern.format(number)


def _read_holder(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _may_be_alive(holder: Mapping[str, Any]) -> bool:
    """Returns True where the process that wrote the lock may still run, for file systems without flock.

    A process on another host cannot be checked, and counts as running.
    """
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    try:
        return bool(abs(psutil.Process(int(holder["pid"])).create_time() - float(holder["started"])) < 1.0)
    except (psutil.Error, KeyError, ValueError):
        return False


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (full name, value) of nested mappings."""
    if not isinstance(tree, Mapping):
        yield prefix, tree
        return
    for name, value in tree.items():
        yield from leaves(value, f"{prefix}.{name}" if prefix else str(name))
