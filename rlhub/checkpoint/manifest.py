"""manifest.json: the file that makes a folder a checkpoint.

It is written last, lists every other file with its size and checksum, and carries a serial number that grows with each
save of a run folder.  The newest checkpoint is the one with the highest serial, not the highest step: after going back
to an earlier step, what the abandoned branch left behind is older.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhub.checkpoint.files import FileEntry, problem_with
from rlhub.errors import CheckpointError
from rlhub.utils.atomic import write_json

MANIFEST = "manifest.json"
STATE = "trainer.json"
FORMAT_VERSION = 1
READ_THREADS = 4  # checksums are computed outside the interpreter lock; four readers keep a fast disk busy


@dataclass(slots=True, kw_only=True)
class Manifest:
    """What a checkpoint's own manifest says.  `metrics` are the validation figures known when it was saved.  finite: whether
    all that it holds was tested to be; False of a manifest that does not say."""

    step: int
    serial: int
    files: list[FileEntry]
    metrics: dict[str, float]
    finite: bool = False


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `folder/manifest.json` atomically; non-finite metrics are left out, they cannot be the best."""
    finite = {name: value for name, value in manifest.metrics.items() if math.isfinite(value)}
    write_json(folder / MANIFEST, {"version": FORMAT_VERSION, **asdict(manifest), "metrics": finite})


def read_manifest(folder: Path) -> Manifest:
    """Read a folder's manifest.  Raises CheckpointError when it is missing, cut short or of another format."""
    path = folder / MANIFEST
    try:
        value = json.loads(path.read_bytes())
        if value["version"] != FORMAT_VERSION:
            raise CheckpointError(f"{path}: written in format {value['version']}, this rlhub reads format {FORMAT_VERSION}")
        files = [FileEntry(path=row["path"], size=row["size"], checksum=row["checksum"]) for row in value["files"]]
        metrics, finite = dict(value["metrics"]), bool(value.get("finite", False))
        return Manifest(step=value["step"], serial=value["serial"], files=files, metrics=metrics, finite=finite)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is no checkpoint, or its save did not finish") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a manifest ({type(error).__name__}: {error}): the file is corrupt") from error


def problems_in(folder: Path, manifest: Manifest, *, verify: bool) -> list[str]:
    """What is wrong with the files a manifest lists; empty when the checkpoint is whole.

    verify=True reads every byte (several files at a time); False compares sizes, which costs nothing.
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
    """The trainer's own state of a checkpoint, as it was given to `commit`."""
    path = folder / STATE
    try:
        value: Mapping[str, Any] = json.loads(path.read_bytes())
        return dict(value)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): the checkpoint is corrupt, use an earlier one") from error
