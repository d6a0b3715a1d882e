"""The base of every worker with a training engine: it saves the engine and loads it.

A checkpoint has the engine's shards per rank, its scalars, the HF-loadable weights, and the adapter of a LoRA run as peft loads
it.
"""

from __future__ import annotations

import json
from pathlib import Path

from rlhub.checkpoint.files import FileEntry, write_file, write_safetensors
from rlhub.checkpoint.hf import write_hf_weights
from rlhub.checkpoint.shard_reader import ShardReader
from rlhub.checkpoint.shards import raw_tensor, write_shards
from rlhub.config.sections.training import ModelConfig
from rlhub.engines.training.base import Adapter, TrainEngine
from rlhub.engines.training.collectives import check_finite
from rlhub.errors import CheckpointError
from rlhub.models.hf import ModelKind, save_sidecars
from rlhub.single_controller import Dispatch, Worker, register

SCALARS = "scalars.json"
HF_FOLDER = "huggingface"
ADAPTER_FOLDER = "adapter"


def save_engine(engine: TrainEngine, folder: Path, rank: int, num_ranks: int) -> list[FileEntry]:
    """Writes every rank's shards; all ranks stream the full weights, rank 0 writes them, the adapter's alone too.  Returns
    this rank's files.  NonFiniteError, before anything is written, where weights or optimizer state are not finite."""
    check_finite(engine, "before the save", optimizer=True)
    entries = write_shards(folder, rank, num_ranks, engine.state_shards())
    if rank == 0:
        entries.append(write_file(folder / SCALARS, json.dumps(engine.scalar_state()).encode()))
    entries += write_hf_weights(folder / HF_FOLDER if rank == 0 else None, engine.named_weights())
    adapter = engine.adapter()
    if adapter is not None:
        entries += _write_adapter(folder / ADAPTER_FOLDER if rank == 0 else None, adapter)
    return entries


def _write_adapter(folder: Path | None, adapter: Adapter) -> list[FileEntry]:
    """`peft.PeftModel.from_pretrained(base, folder)` reads what one rank writes; the others walk the stream (None)."""
    if folder is None:
        for _ in adapter.buckets:
            continue
        return []
    folder.mkdir(parents=True, exist_ok=True)
    tensors = [raw_tensor(name, tensor.to("cpu", copy=True)) for bucket in adapter.buckets for name, tensor in bucket]
    text = json.dumps(adapter.config, indent=2, sort_keys=True)
    return [
        write_safetensors(folder / "adapter_model.safetensors", tensors),
        write_file(folder / "adapter_config.json", text.encode("utf-8")),
    ]


def load_engine(engine: TrainEngine, folder: Path) -> None:
    """Reads this rank's slices from whatever ranks wrote them.  Raises NonFiniteError where the weights are not finite."""
    scalars = folder / SCALARS
    if not scalars.is_file():
        raise CheckpointError(f"{scalars} is missing: {folder} is not a training checkpoint; use an earlier one")
    with ShardReader(folder) as reader:
        engine.load_state(reader.read)
    engine.load_scalar_state(json.loads(scalars.read_text()))
    check_finite(engine, f"in the checkpoint {folder} (trainer.resume_mode=resume_path takes an earlier one)")


class EngineWorker(Worker):
    """engine: built by the subclass.  hf_model: the model whose tokenizer and configuration are saved beside the weights;
    None saves weights alone.  hf_kind: what the engine trains."""

    engine: TrainEngine
    hf_model: ModelConfig | None = None
    hf_kind: ModelKind = "policy"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="checkpoint")
    def save_checkpoint(self, folder: str) -> list[FileEntry]:
        """Writes this rank's shards below `folder`, and from rank 0 the weights under their Hugging Face names."""
        entries = save_engine(self.engine, Path(folder), self.rank, self.world_size)
        self.engine.offload()
        if self.rank == 0 and self.hf_model is not None:
            save_sidecars(self.hf_model, Path(folder) / HF_FOLDER, self.hf_kind)
        return entries

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="checkpoint")
    def load_checkpoint(self, folder: str) -> None:
        """Loads weights, optimizer and schedule as they were saved, whatever the number of ranks then."""
        load_engine(self.engine, Path(folder))
        self.engine.offload()
