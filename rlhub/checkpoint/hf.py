"""Weights as Hugging Face safetensors files, written from a stream of buckets.

The stream's tensors live only until the next bucket is requested, so one file's tensors are kept in host memory: a save needs
that much, however large the model is.  The format is described at https://huggingface.co/docs/safetensors, with transformers'
sharded index.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from rlhub.checkpoint.files import FileEntry, storage_errors, write_file, write_safetensors
from rlhub.checkpoint.shards import raw_tensor

MAX_SHARD_BYTES = 2 << 30
Bucket = list[tuple[str, Tensor]]


def write_hf_weights(
    folder: Path | None,
    buckets: Iterable[Bucket],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
) -> list[FileEntry]:
    """Writes `model.safetensors`, or numbered files and `model.safetensors.index.json`, for transformers to load.

    Every rank that shares the stream calls it, because producing a bucket is collective: one rank passes the folder, and the
    others pass None, iterate over the stream and write nothing.  Blocks until everything is on the disk.  Raises
    CheckpointError on a disk error.

    dtype: the dtype to which floating-point weights are cast; None keeps theirs.
    """
    if folder is None:
        for _ in buckets:
            pass
        return []
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[FileEntry] = []
    names: list[list[str]] = []
    tensors: dict[str, Tensor] = {}  # of the next file
    file_bytes = total_bytes = 0
    for bucket in buckets:
        for name, tensor in bucket:
            copied = _own_copy(tensor, dtype)
            num_bytes = copied.numel() * copied.element_size()
            if tensors and file_bytes + num_bytes > max_shard_bytes:
                parts.append(_write_part(folder, len(parts), tensors))
                names.append(list(tensors))
                tensors, file_bytes = {}, 0
            tensors[name] = copied
            file_bytes += num_bytes
            total_bytes += num_bytes
    parts.append(_write_part(folder, len(parts), tensors))
    names.append(list(tensors))
    return _name_parts(folder, parts, names, total_bytes)


def _own_copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    cast = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=cast, copy=True).contiguous()


def _write_part(folder: Path, number: int, tensors: dict[str, Tensor]) -> FileEntry:
    return write_safetensors(folder / f"part-{number:05d}.safetensors", [raw_tensor(name, t) for name, t in tensors.items()])


def _name_parts(folder: Path, parts: list[FileEntry], names: list[list[str]], total_bytes: int) -> list[FileEntry]:
    """Renames the files to the names that loaders look for, which contain the number of files and so are known only at the
    end."""
    count = len(parts)
    finals = ["model.safetensors"] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    entries = []
    with storage_errors(f"naming the weight files of {folder}"):
        for part, final in zip(parts, finals, strict=True):
            os.replace(part.path, folder / final)
            entries.append(FileEntry(path=str((folder / final).absolute()), size=part.size, checksum=part.checksum))
    if count > 1:
        weight_map = {name: final for final, group in zip(finals, names, strict=True) for name in group}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        text = json.dumps(index, indent=2).encode("utf-8")
        entries.append(write_file(folder / "model.safetensors.index.json", text))
    return entries
