"""The export's worker: weights out of a checkpoint's shards into a Hugging Face folder, a tensor at a time, and its proof."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhub.checkpoint.hf import Bucket, write_hf_weights
from rlhub.checkpoint.shard_reader import ShardReader
from rlhub.config.sections.model import ModelConfig
from rlhub.errors import CheckpointError
from rlhub.models.hf import SCALAR_HEAD, ModelKind
from rlhub.models.lora import ADAPTER
from rlhub.models.sidecars import save_sidecars
from rlhub.single_controller import Dispatch, Worker, register
from rlhub.utils.finite import nonfinite_names
from rlhub.workers.checkpointing import ADAPTER_FOLDER
from rlhub.workers.verify_export import Verification, verify_export

logger = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHTS = "model."  # in front of weights' names in a checkpoint
LORA = re.compile(rf"(.*)\.lora_[AB]\.{ADAPTER}\.weight")
PROGRESS_STEP = 0.1


@dataclass(slots=True, kw_only=True)
class ExportJob:
    """folder: of a role in a checkpoint.  output: an empty folder.  model: where configuration and tokenizer are.  dtype: of
    the exported weights; None: as they are stored."""

    folder: Path
    output: Path
    model: ModelConfig
    dtype: str | None
    max_shard_bytes: int


@dataclass(slots=True, kw_only=True, frozen=True)
class Written:
    """dtype: that of the most bytes, as torch calls it."""

    num_tensors: int
    num_bytes: int
    dtype: str


class ExportWorker(Worker):
    """One process, on the CPU."""

    def __init__(self, job: ExportJob) -> None:
        self.job = job
        self.dtype = None if job.dtype is None else DTYPES[job.dtype]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def write(self) -> Written:
        """Weights, configuration, tokenizer; holds one file's worth of weights at a time."""
        with ShardReader(self.job.folder) as reader:
            weights = StoredModel(reader, read_adapter(self.job.folder))
            kind = weights.kind
            save_sidecars(self.job.model, self.job.output, kind, dtype=self.dtype or weights.dtype)
            buckets = self._finite(weights.buckets())
            write_hf_weights(self.job.output, buckets, max_shard_bytes=self.job.max_shard_bytes, dtype=self.dtype)
            dtype = self.dtype or weights.dtype
            num_bytes = weights.num_elements * dtype.itemsize
            return Written(num_tensors=len(weights.names), num_bytes=num_bytes, dtype=str(dtype).removeprefix("torch."))

    def _finite(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        """What passes is finite, in the dtype it is written in: fp16 ends at 65504.  Raises CheckpointError."""
        for bucket in buckets:
            cast = ((name, tensor if self.dtype is None else tensor.to(self.dtype)) for name, tensor in bucket)
            if found := nonfinite_names(cast):
                written = "" if self.dtype is None else f" in {self.job.dtype}"
                remedy = "export another checkpoint" + (", or in bf16 or fp32" if self.dtype == torch.float16 else "")
                raise CheckpointError(f"{self.job.folder}: {found[0]} is not finite{written}; {remedy}")
            yield bucket

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def verify(self) -> Verification:
        """What plain transformers makes of the output, beside an engine that loads the checkpoint's own shards."""
        adapter = read_adapter(self.job.folder)
        model = replace(self.job.model, path=str(self.job.output), override_config={}, enable_gradient_checkpointing=False)
        if adapter is not None:
            model = replace(model, lora_rank=adapter.rank, lora_alpha=adapter.alpha, target_modules=adapter.targets)
        with ShardReader(self.job.folder) as reader:
            stored = StoredModel(reader, adapter)
            return verify_export(model, stored.kind, reader, stored_dtype=stored.dtype, dtype=self.dtype)


@dataclass(slots=True, kw_only=True, frozen=True)
class AdapterSettings:
    """Of the LoRA adapters that a checkpoint holds beside the frozen weights.  targets: names of the adapted layers."""

    rank: int
    alpha: float
    targets: list[str]


def read_adapter(folder: Path) -> AdapterSettings | None:
    """From adapter_config.json; None where the checkpoint has no adapters."""
    path = folder / ADAPTER_FOLDER / "adapter_config.json"
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return AdapterSettings(rank=content["r"], alpha=content["lora_alpha"], targets=list(content["target_modules"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use an earlier checkpoint") from error


class StoredModel:
    """The weights in a checkpoint's shards under their Hugging Face names, adapters merged."""

    def __init__(self, reader: ShardReader, adapter: AdapterSettings | None) -> None:
        self.reader, self.adapter = reader, adapter
        stored = [name.removeprefix(WEIGHTS) for name in reader.names() if name.startswith(WEIGHTS)]
        self.names = [name for name in stored if not LORA.fullmatch(name)]
        self.adapted = {match[1] for name in stored if (match := LORA.fullmatch(name))}
        if not self.names:
            raise CheckpointError(f"{reader.folder} has no weights, only {', '.join(reader.names()[:3])}; use another checkpoint")
        if self.adapted and adapter is None:
            raise CheckpointError(
                f"{reader.folder} holds LoRA adapters, but {ADAPTER_FOLDER}/adapter_config.json with their scale is missing"
            )

    @property
    def kind(self) -> ModelKind:
        """A critic and a reward model are the same model in a file."""
        return "value" if f"{SCALAR_HEAD}.weight" in self.names else "policy"

    @property
    def dtype(self) -> torch.dtype:
        """Master weights have one dtype."""
        return self.reader.dtype(WEIGHTS + self.names[0])

    @property
    def num_elements(self) -> int:
        return sum(torch.Size(self.reader.shape(WEIGHTS + name)).numel() for name in self.names)

    def buckets(self) -> Iterator[Bucket]:
        """Each weight by itself."""
        told, done, total = 0.0, 0, self.num_elements
        for number, name in enumerate(self.names, 1):
            tensor = self._weight(name)
            yield [(name, tensor)]
            done += tensor.numel()
            if done / total >= told + PROGRESS_STEP or number == len(self.names):
                told = done / total
                logger.info("%3d %%: %d of %d weights", int(100 * told), number, len(self.names))

    def _weight(self, name: str) -> Tensor:
        weight = self.reader.whole(WEIGHTS + name)
        layer = name.removesuffix(".weight")
        if layer not in self.adapted or self.adapter is None:
            return weight
        low, high = (self.reader.whole(f"{WEIGHTS}{layer}.lora_{side}.{ADAPTER}.weight") for side in "AB")
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        scaling = self.adapter.alpha / self.adapter.rank
        return torch.addmm(weight.to(exact), high.to(exact), low.to(exact), alpha=scaling).to(weight.dtype)
