"""Exchanges trajectories through a folder: one job collects them while another one trains, with nothing else between the two.

    <url>/<writer>-<number>.rows            the tokens of the samples, row by row; see trajectory_rows.py
    <url>/<writer>-<number>.jsonl.gz        the index: groups, one JSON object per line, with numbers and place of each row
    <url>/<writer>-<number>.manifest.json   the index's checksum and size, number of groups and their versions; written last
    <url>/<writer>.end.json                 the writer has ended, and the number of its files

The url is any that fsspec supports (a path, s3://..., memory://...).  A file without a manifest is ignored.  Each writer numbers
its files without gaps, so a cursor is one number per writer and a line; a reader that restarts from its cursor reads every group
exactly once.  A reader reads the index alone: the processes that compute on tokens read them themselves, at the same url, which
their machines must reach with the credentials that fsspec finds there.  Nothing is pickled.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlhub.agents.trajectory import Row, Sampled, Trajectory, TrajectoryRef, rows_of, with_rows
from rlhub.errors import DataError, DeadlineError
from rlhub.rollout_service.executor.episode_groups import Group, PromptItem, StalePolicy, mask_older
from rlhub.rollout_service.trajectory_rows import Folder, RowPlace, pack

FORMAT = 2
ROWS = ".rows"
POLL_S = 0.05
MAX_POLL_S = 1.0  # object stores charge for listings
WRITER = re.compile(r"[A-Za-z0-9_.]+")
MANIFEST = ".manifest.json"
COMPRESSION = 3  # token ids shrink about as much as with the highest level, in a third of the time


class TrajectoryWriter:
    """Writes groups to numbered files.  name: of this writer in the folder; after a restart under the same name the numbers
    continue."""

    def __init__(self, url: str, name: str = "collector") -> None:
        if not WRITER.fullmatch(name):
            raise ValueError(f"a writer is named by letters, digits, _ and . only, got {name!r}")
        self.name, self._folder = name, Folder(url=url)
        self.next_number = max((number + 1 for number in _numbers(self._folder.names(), name)), default=0)

    def write(self, groups: Sequence[Group]) -> str:
        """Writes the groups to one file and returns its name.  Readers can read it from then on."""
        rows = bytearray()
        lines = "".join(json.dumps(encode(group, rows), default=_plain) + "\n" for group in groups)
        data = gzip.compress(lines.encode(), COMPRESSION, mtime=0)
        stem = stem_of(self.name, self.next_number)
        versions = [version for group in groups for t in group.whole for version in t.versions if version >= 0]
        manifest = {
            "format": FORMAT,
            "groups": len(groups),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
            "versions": [min(versions, default=-1), max(versions, default=-1)],
        }
        self._folder.write(stem + ROWS, bytes(rows))
        self._folder.write(f"{stem}.jsonl.gz", data)
        self._folder.write(stem + MANIFEST, json.dumps(manifest).encode())
        self.next_number += 1
        return f"{stem}.jsonl.gz"

    def end(self) -> None:
        """Marks the end of this writer, so that readers do not wait for it."""
        self._folder.write(f"{self.name}.end.json", json.dumps({"files": self.next_number}).encode())


def encode(group: Group, rows: bytearray) -> dict[str, Any]:
    """Returns the JSON-able numbers of a group with the prompt's other columns, and adds the tokens of its samples to `rows`.

    Raises ValueError for a sample that cannot be trained, or whose tokens are in another process.
    """

    def stored(sample: Sampled) -> Sampled:
        return with_rows(sample, [_stored(row, rows) for row in rows_of(sample)])

    for sample in group.trajectories:
        if not isinstance(sample, TrajectoryRef):
            sample.check()
    baseline = None if group.baseline is None else stored(group.baseline)
    numbers = replace(group, trajectories=[stored(sample) for sample in group.trajectories], baseline=baseline)
    return {"row": dict(group.item.row), **numbers.to_json()}


def _stored(row: Row, rows: bytearray) -> TrajectoryRef:
    if not isinstance(row, Trajectory):
        raise ValueError(f"the tokens of row {row.key} are in process {row.home}; read them first")
    data, start = pack(row), len(rows)
    rows += data
    return TrajectoryRef.of(row, "", RowPlace(start, len(rows), zlib.crc32(data)).key)


def decode(state: Mapping[str, Any], ordinal: int, home: str) -> Group:
    """Returns the group of an `encode`d one under another ordinal, because several writers use the same ones.

    home: the file of its rows, where they are read; the prompt's tokens are there too.
    """
    group = Group.from_json(state, PromptItem(prompt_ids=(), ordinal=ordinal, row=state["row"]))
    for row in (row for sample in group.scored for row in rows_of(sample)):
        assert isinstance(row, TrajectoryRef), "the index has numbers only"
        row.home = home
    return group


@dataclass(slots=True)
class _TakenGroups:
    """The groups that training has taken for a step, and the cursor after them."""

    step: int
    cursor: dict[str, Any]


class TrajectoryReader:
    """Reads groups in the order of the files.

    max_staleness: the bound on the number of versions behind the newest one; None for no bound.  stale_policy: drop older groups,
    mask their old tokens, or leave them to the correction.  Ordinals are numbered by this reader.
    """

    def __init__(self, url: str, *, max_staleness: int | None = None, stale_policy: StalePolicy = "drop") -> None:
        self._folder = Folder(url=url)
        self._max_staleness, self._policy = max_staleness, stale_policy
        self._version = 0
        self._done: dict[str, int] = {}  # files of each writer that were read to their end
        self._file: tuple[str, int] | None = None
        self._line = 0  # of that file, the next
        self._lines: list[str] = []
        self._ordinal = 0
        self._taken: list[_TakenGroups] = []
        self._trained = self._cursor()
        self._counts = {"accepted_groups": 0, "dropped_groups": 0, "masked_tokens": 0}
        self._wait_s = 0.0

    # Methods for training.

    @property
    def first_ordinal(self) -> int:
        """Returns the lowest ordinal that is neither trained nor dropped."""
        return int(self._trained["ordinal"])

    def next_groups(self, count: int, timeout: float | None = None, *, step: int | None = None) -> list[Group]:
        """Returns `count` groups to train at `step` (None: the step after the current version).

        Waits for files; returns fewer groups only when every writer has ended.  Raises DeadlineError after `timeout` seconds,
        without losing any group, and DataError for a damaged file.
        """
        step = self._version + 1 if step is None else step
        before, started, pause = self._cursor(), time.monotonic(), POLL_S
        groups: list[Group] = []
        while len(groups) < count:
            group = self._next(step)
            if group is not None:
                groups.append(group)
                pause = POLL_S
                continue
            if self._ended():
                break
            waited = time.monotonic() - started
            if timeout is not None and waited >= timeout:
                self._go_to(before)
                self._wait_s += waited
                hint = f"{len(groups)} are there; does the job that collects still run?"
                raise DeadlineError(f"{count} groups in {self._folder.url}", timeout, hint)
            time.sleep(pause if timeout is None else min(pause, timeout - waited))
            pause = min(2 * pause, MAX_POLL_S)
        self._wait_s += time.monotonic() - started
        self._counts["accepted_groups"] += len(groups)
        self._taken.append(_TakenGroups(step, self._cursor()))
        return groups

    @property
    def url(self) -> str:
        """Returns the URL of the folder, the same for all processes."""
        return self._folder.absolute

    def trained(self, step: int) -> None:
        """Marks the groups that were taken for this step or an earlier one as trained."""
        for taken in self._taken:
            if taken.step <= step:
                self._trained = taken.cursor
        self._taken = [taken for taken in self._taken if taken.step > step]

    def set_version(self, version: int) -> None:
        """Ends step `version`, whose groups are trained then."""
        self.trained(version)
        self._version = version

    def metrics(self) -> dict[str, float]:
        """Returns the counts since the last call; rollout/index_bytes are those that this process has read of the files."""
        found = {f"rollout/{name}": float(value) for name, value in self._counts.items()} | {"rollout/wait_s": self._wait_s}
        found["rollout/index_bytes"], self._folder.read_bytes = float(self._folder.read_bytes), 0
        self._counts, self._wait_s = dict.fromkeys(self._counts, 0), 0.0
        return found

    def state(self) -> dict[str, Any]:
        """Returns the JSON-able position after the trained groups.  Groups of an unfinished step are read again."""
        return {"cursor": self._trained, "version": self._version, "finished": []}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`.  Must come before the first `next_groups`."""
        self._version = int(state["version"])
        self._trained = dict(state["cursor"])
        self._go_to(self._trained)

    # Methods that read the files.

    def _cursor(self) -> dict[str, Any]:
        return {"files": dict(self._done), "file": self._file, "line": self._line, "ordinal": self._ordinal}

    def _go_to(self, cursor: Mapping[str, Any]) -> None:
        self._done, self._line, self._ordinal = dict(cursor["files"]), int(cursor["line"]), int(cursor["ordinal"])
        self._file = None
        self._lines = []
        if cursor["file"] is not None:
            writer, number = cursor["file"]
            self._file = (str(writer), int(number))
            self._lines = self._read(self._file)

    def _next(self, step: int) -> Group | None:
        """Returns the next group that may train at this step, or None while there is no file with one."""
        while True:
            if self._file is not None and self._line < len(self._lines):
                group = decode(json.loads(self._lines[self._line]), self._ordinal, stem_of(*self._file) + ROWS)
                self._line += 1
                self._ordinal += 1
                if self._fresh(group, step):
                    return group
            elif not self._open_next():
                return None

    def _fresh(self, group: Group, step: int) -> bool:
        if self._max_staleness is None or self._policy == "correct":
            return True
        oldest = step - 1 - self._max_staleness
        if group.first_version >= oldest:
            return True
        if self._policy == "mask":
            self._counts["masked_tokens"] += mask_older(group, oldest)
            if group.num_tokens:
                return True
        self._counts["dropped_groups"] += 1
        return False

    def _open_next(self) -> bool:
        """Opens the next file of the writer of which the fewest files were read; returns whether there is one."""
        if self._file is not None:
            writer, number = self._file
            self._done[writer] = number + 1
            self._file, self._line, self._lines = None, 0, []
        names = self._folder.names()
        waiting = []
        for writer in sorted({_split(name)[0] for name in names if name.endswith(MANIFEST)}):
            number = self._done.get(writer, 0)
            if stem_of(writer, number) + MANIFEST in names:
                waiting.append((number, writer))
        if not waiting:
            return False
        number, writer = min(waiting)
        lines = self._read((writer, number))
        self._file, self._line, self._lines = (writer, number), 0, lines
        return True

    def _read(self, file: tuple[str, int]) -> list[str]:
        stem = stem_of(*file)
        manifest = json.loads(self._folder.read(stem + MANIFEST))
        if manifest["format"] != FORMAT:
            raise DataError(
                f"{self._folder.url}/{stem}: format {manifest['format']}, this rlhub reads {FORMAT}; collect anew, or train on "
                "these files with the version that wrote them"
            )
        data = self._folder.read(f"{stem}.jsonl.gz")
        if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
            raise DataError(
                f"{self._folder.url}/{stem}.jsonl.gz is not what its manifest says ({len(data)} bytes, {manifest['bytes']} "
                "written): it was damaged after it was written; remove the two files of this number's writer, or collect anew"
            )
        return gzip.decompress(data).decode().splitlines()

    def _ended(self) -> bool:
        names = self._folder.names()
        writers = {_split(name)[0] for name in names if name.endswith(MANIFEST)}
        ends = {name.removesuffix(".end.json") for name in names if name.endswith(".end.json")}
        if not ends or not writers <= ends:
            return False
        return all(self._done.get(name, 0) >= json.loads(self._folder.read(f"{name}.end.json"))["files"] for name in ends)


def stem_of(writer: str, number: int) -> str:
    """Returns the common part of the names of a writer's files of this number."""
    return f"{writer}-{number:08d}"


def _split(name: str) -> tuple[str, int]:
    writer, _, number = name.removesuffix(MANIFEST).rpartition("-")
    return writer, int(number)


def _numbers(names: Sequence[str], writer: str) -> list[int]:
    split = (_split(name) for name in names if name.endswith(MANIFEST))
    return [number for owner, number in split if owner == writer]


def _plain(value: Any) -> Any:
    """Returns numpy values, which rows of data sets may contain, in a form that JSON can represent."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"a trajectory's row holds a {type(value).__name__}, which has no form in JSON: {value!r:.100}")
