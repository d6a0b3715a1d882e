"""What every worker with a training engine can do: save it and load it."""

from __future__ import annotations

from pathlib import Path

from rlhub.checkpoint.files import FileEntry
from rlhub.config.sections.model import ModelConfig
from rlhub.engines.training.base import TrainEngine
from rlhub.models.hf import ModelKind
from rlhub.models.sidecars import save_sidecars
from rlhub.single_controller import Dispatch, Worker, register
from rlhub.workers.checkpointing import HF_FOLDER, load_engine, save_engine


class EngineWorker(Worker):
    """engine: built by the subclass.  hf_model: the model whose tokenizer and configuration are saved beside the weights;
    None saves weights alone.  hf_kind: what the engine trains."""

    engine: TrainEngine
    hf_model: ModelConfig | None = None
    hf_kind: ModelKind = "policy"

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: str) -> list[FileEntry]:
        """This rank's shards below `folder`, and from rank 0 the weights under their Hugging Face names."""
        entries = save_engine(self.engine, Path(folder), self.rank, self.world_size)
        self.engine.offload()
        if self.rank == 0 and self.hf_model is not None:
            save_sidecars(self.hf_model, Path(folder) / HF_FOLDER, self.hf_kind)
        return entries

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, folder: str) -> None:
        """Weights, optimizer and schedule as they were saved, whatever the number of ranks then."""
        load_engine(self.engine, Path(folder))
        self.engine.offload()
