"""The weight files of a local model folder, by their headers: their tensors, and whether they are whole.

It reads a few kilobytes per file and loads neither torch nor transformers, so that an incomplete download is found before any
process starts.  The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhub.errors import ConfigError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LENGTH_BYTES = 8  # a file begins with the header's length in this many bytes, little-endian
REMEDY = "copy or download the model again"


@dataclass(slots=True, kw_only=True, frozen=True)
class StoredTensor:
    """A stored tensor: its file and shape."""

    file: str
    shape: tuple[int, ...]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Returns all tensors of a folder's safetensors files by name; {} for a folder without any (older ones have PyTorch's
    files).

    Raises ConfigError listing every file that is missing, cut short or unreadable, and every tensor that is not where the
    index says.
    """
    problems: list[str] = []
    named = _indexed(folder, problems)
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(named.values())) if named else [SINGLE] * (folder / SINGLE).is_file():
        found |= _tensors(folder / file, problems)
    broken = {name for text in problems for name in set(named.values()) if name in text}
    for name, file in named.items():
        if file not in broken and (name not in found or found[name].file != file):
            problems.append(f"{folder / INDEX}: {name} should be in {file}, which does not have it; {REMEDY}")
    if problems:
        raise ConfigError(problems)
    return found


def file_problems(folder: Path) -> list[str]:
    """Returns the problems of the weight files of a local folder; [] for a folder without any."""
    try:
        stored_tensors(folder)
    except ConfigError as error:
        return list(error.problems)
    return []


def _indexed(folder: Path, problems: list[str]) -> dict[str, str]:
    """Returns the file of each tensor in the index; {} if one file has all tensors, which transformers prefers to an index."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return {}
    try:
        named: dict[str, str] = dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"{folder / INDEX} cannot be read as an index of weights ({type(error).__name__}: {error}); {REMEDY}")
        return {}
    return named


def _tensors(path: Path, problems: list[str]) -> dict[str, StoredTensor]:
    """Reads the header of one file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
                problems.append(f"{path} is cut short, or no safetensors file: it has {size} bytes; {REMEDY}")
                return {}
            header: dict[str, Any] = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        end = LENGTH_BYTES + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if size != end:
            problems.append(f"{path} is {'cut short' if size < end else 'damaged'}: {size} bytes, {end} by its header; {REMEDY}")
            return {}
        return {name: StoredTensor(file=path.name, shape=tuple(entry["shape"])) for name, entry in header.items()}
    except FileNotFoundError:
        problems.append(f"{path.parent / INDEX} names {path.name}, which is not there; {REMEDY}")
    except OSError as error:
        problems.append(f"{path}: {error.strerror or error}; {REMEDY}")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        problems.append(f"{path}: its header cannot be read ({type(error).__name__}: {error}); {REMEDY}")
    return {}
