"""A training engine's state to and from a checkpoint folder: shards per rank, scalars, and the HF-loadable weights."""

from __future__ import annotations

import json
from pathlib import Path

from rlhub.checkpoint.files import FileEntry, write_file
from rlhub.checkpoint.hf import write_hf_weights
from rlhub.checkpoint.shards import ShardReader, write_shards
from rlhub.engines.training.base import TrainEngine
from rlhub.errors import CheckpointError

SCALARS = "scalars.json"
HF_FOLDER = "huggingface"


def save_engine(engine: TrainEngine, folder: Path, rank: int) -> list[FileEntry]:
    """Every rank writes its shards; all ranks stream the full weights, rank 0 writes them.  Returns this rank's files."""
    entries = write_shards(folder, rank, engine.state_shards())
    buckets = engine.named_weights()
    if rank == 0:
        entries.append(write_file(folder / SCALARS, json.dumps(engine.scalar_state()).encode()))
        return entries + write_hf_weights(folder / HF_FOLDER, buckets)
    for _ in buckets:
        continue
    return entries


def load_engine(engine: TrainEngine, folder: Path) -> None:
    """Read this rank's slices from whatever ranks wrote them."""
    scalars = folder / SCALARS
    if not scalars.is_file():
        raise CheckpointError(f"{scalars} is missing: {folder} is not a training checkpoint; use an earlier one")
    with ShardReader(folder) as reader:
        engine.load_state(reader.read)
    engine.load_scalar_state(json.loads(scalars.read_text()))
