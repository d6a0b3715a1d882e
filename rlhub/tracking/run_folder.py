"""RunFolder: where everything of one run lies, and the lock that keeps a second run out.

    <default_local_dir>/
        config.yaml            resolved settings, secrets hidden      metrics.jsonl    one object per step
        report.html            the run at a glance                    generations/     sample completions
        logs/<role>-rank<r>.log                                       global_step_<n>/ checkpoints
        trace.json             what ran when, for trace viewers       earlier-<k>/     a run that was started anew here
        run.lock tracking.json

The lock is the kernel's (flock): it goes away with the process that holds it, however that ends.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from rlhub.errors import RunFolderError
from rlhub.utils.atomic import write_json, write_text
from rlhub.utils.redact import redact

logger = logging.getLogger(__name__)

NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # some network file systems
OWNER_ONLY = 0o600
KEPT_ON_RESTART = {"run.lock"}
TRAINED_BY = frozenset(
    ("seed", "plugins", "critic_warmup", "max_staleness", "pipeline_depth", "stale_policy", "replay_from", "placement")
)
"""Settings of the section `trainer` on which it depends what is learned."""
LENGTH = "optim.total_training_steps"
"""End of the names of what follows from the length of the run."""


class RunFolder:
    """Paths of a run folder, and its lock.  `open` (or `with`) before writing; reading needs no lock."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None

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
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def generations(self) -> Path:
        return self.path / "generations"

    def open(self) -> RunFolder:
        """Create what is missing and take the lock.  RunFolderError when another run has it or the place is not writable."""
        try:
            for folder in (self.path, self.logs, self.generations):
                folder.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
        except OSError as error:
            raise RunFolderError(
                f"cannot write to the run folder {self.path}: {error.strerror or error}; set trainer.default_local_dir to another"
            ) from error
        return self

    def _take_lock(self) -> int:
        path = self.path / "run.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            holder = _read_holder(path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise self._taken(holder) from None
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                if _may_be_alive(holder):
                    raise self._taken(holder) from None
            me = {"pid": os.getpid(), "host": socket.gethostname(), "started": psutil.Process().create_time()}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(me).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        if holder:
            logger.info("%s: took over the lock of an ended run (pid %s on %s)", path, holder.get("pid"), holder.get("host"))
        return descriptor

    def _taken(self, holder: Mapping[str, Any]) -> RunFolderError:
        return RunFolderError(
            f"another run is using {self.path} (pid {holder.get('pid', '?')} on {holder.get('host', '?')}); "
            "wait for it, end it, or set trainer.experiment_name or trainer.default_local_dir to another name"
        )

    def close(self) -> None:
        """Give the lock back; the folder may be opened again, by anyone."""
        if self._lock is not None:
            os.ftruncate(self._lock, 0)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunFolder:
        return self.open()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write config.yaml, for its owner alone and with secrets hidden.  A differing one of an earlier start is kept as
        config.<k>.yaml."""
        text = yaml.safe_dump(redact(config), sort_keys=False, allow_unicode=True, width=120)
        if self.config.exists() and (old := self.config.read_text(encoding="utf-8")) != text:
            write_text(_unused(self.path, "config.{}.yaml"), old, mode=OWNER_ONLY)
        write_text(self.config, text, mode=OWNER_ONLY)

    def changes(self, config: Mapping[str, Any]) -> list[str]:
        """`key: before -> now` of the settings in which config.yaml differs from these, leaving out derived lengths and what of
        the section `trainer` says how long, where and how often, and not what is trained; [] without a readable file."""
        try:
            before = dict(_leaves(redact(yaml.safe_load(self.config.read_text(encoding="utf-8")))))
        except (OSError, ValueError, yaml.YAMLError):
            return []
        now = dict(_leaves(yaml.safe_load(yaml.safe_dump(redact(config)))))
        names = [name for name in now if name in before and _says_what_is_trained(name)]
        return [f"{name}: {before[name]} -> {now[name]}" for name in names if before[name] != now[name]]

    def note(self, name: str) -> str | None:
        """A short text that an earlier start left with `write_note` (a tracker's run id), or None."""
        return self._notes().get(name)

    def write_note(self, name: str, value: str) -> None:
        """Keep a short text for later starts in this folder."""
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
        """Make room for a run from the beginning: move everything here into `earlier-<k>`, which is returned; None when
        there was nothing of a run.  Call it after `open`."""
        moving = [
            path for path in self.path.iterdir() if path.name not in KEPT_ON_RESTART and not path.name.startswith("earlier-")
        ]
        if not any(path.is_file() or any(path.iterdir()) for path in moving):
            return None
        target = _unused(self.path, "earlier-{}")
        target.mkdir()
        for path in moving:
            os.replace(path, target / path.name)
        for folder in (self.logs, self.generations):
            folder.mkdir()
        return target


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
    """Without flock: whether the process that wrote the lock still runs; on another host nobody can tell, so yes."""
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return True
    try:
        return bool(abs(psutil.Process(int(holder["pid"])).create_time() - float(holder["started"])) < 1.0)
    except (psutil.Error, KeyError, ValueError):
        return False


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(full name, value) of nested mappings."""
    if not isinstance(tree, Mapping):
        yield prefix, tree
        return
    for name, value in tree.items():
        yield from _leaves(value, f"{prefix}.{name}" if prefix else str(name))
