"""manifest.json: the file that makes a folder a checkpoint.

It is written last, lists every other file with its size and checksum, and has a serial number that grows with each save of a
run folder.  The newest checkpoint is the one with the highest serial, not the highest step: after a return to an earlier step,
the checkpoints of the abandoned branch are older.

The manifest has a checksum of its own content too, so a step or a size that changed on the disk is detected as in every other
file.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from rlhub.checkpoint.files import CHECKSUM, FileEntry, problem_with
from rlhub.errors import CheckpointError
from rlhub.utils.atomic import write_json

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "trainer.json"
FORMAT_VERSION = 2
WITHOUT_CHECKSUM = 1
"""The format before the manifest had a checksum of its own; it can still be read."""
READ_THREADS = 4  # checksums are computed outside the interpreter lock, and four readers keep a fast disk busy


@dataclass(slots=True, kw_only=True)
class Manifest:
    """The content of a manifest.

    metrics: the validation metrics that were known when the checkpoint was saved.
    finite: whether all its weights were found to be finite; False for a manifest without the entry.
    """

    step: int
    serial: int
    files: list[FileEntry]
    metrics: dict[str, float]
    finite: bool = False


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `folder/manifest.json` atomically, without non-finite metrics, which cannot be the best."""
    finite = {name: value for name, value in manifest.metrics.items() if math.isfinite(value)}
    value = {"version": FORMAT_VERSION, **asdict(manifest), "metrics": finite}
    write_json(folder / MANIFEST, {**value, "checksum": _checksum(value)})


def _checksum(value: Mapping[str, Any]) -> str:
    """Returns the checksum of the content without its own checksum, independent of the layout."""
    content = {name: item for name, item in value.items() if name != "checksum"}
    return f"{CHECKSUM}:{xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode('utf-8'))}"


def read_manifest(folder: Path) -> Manifest:
    """Reads a folder's manifest.  Raises CheckpointError if it is missing, cut short or of another format."""
    path = folder / MANIFEST
    try:
        value = json.loads(path.read_bytes())
        if value["version"] not in (FORMAT_VERSION, WITHOUT_CHECKSUM):
            raise CheckpointError(f"{path}: written in format {value['version']}, this rlhub reads format {FORMAT_VERSION}")
        if value["version"] == WITHOUT_CHECKSUM and "checksum" not in value:
            _warn_of_older_format(path)
        elif value["checksum"] != _checksum(value):
            raise CheckpointError(
                f"{path} has another checksum than its content: it changed after it was written; use another checkpoint"
            )
        files = [FileEntry(path=row["path"], size=row["size"], checksum=row["checksum"]) for row in value["files"]]
        metrics, finite = dict(value["metrics"]), bool(value.get("finite", False))
        return Manifest(step=value["step"], serial=value["serial"], files=files, metrics=metrics, finite=finite)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is no checkpoint, or its save did not finish") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a manifest ({type(error).__name__}: {error}): the file is corrupt") from error


@functools.cache
def _warn_of_older_format(path: Path) -> None:
    """Warns once per checkpoint, however often it is read."""
    logger.warning("%s is of an older format without a checksum of its own: a changed step would not be detected", path)


def problems_in(folder: Path, manifest: Manifest, *, verify: bool) -> list[str]:
    """Returns the problems with the files that a manifest lists; an empty list means that the checkpoint is whole.

    verify: True reads every byte, several files at a time; False compares sizes, which costs nothing.
    """

    def check(entry: FileEntry) -> str | None:
        return problem_with(folder / entry.path, entry, verify=verify)

    if not verify:
        return _found(map(check, manifest.files))
    with ThreadPoolExecutor(READ_THREADS) as pool:
        return _found(pool.map(check, manifest.files))


def _found(problems: Iterable[str | None]) -> list[str]:
    return [problem for problem in problems if problem is not None]


def read_state(folder: Path) -> dict[str, Any]:
    """Returns the trainer's own state of a checkpoint, as it was given to `commit`."""
    path = folder / STATE
    try:
        value: Mapping[str, Any] = json.loads(path.read_bytes())
        return dict(value)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): the checkpoint is corrupt, use an earlier one") from error
