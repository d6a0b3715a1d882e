"""The export's worker: weights out of a checkpoint's shards into a Hugging Face folder, a tensor at a time, and its proof.

The proof is that two independent readings of the folder agree: plain transformers on the exported files, and a training engine
that loads the checkpoint's shards as a resumed run does.  Both compute in float32 (float64 for a float64 checkpoint) on the CPU.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PI0ForConditionalGeneration,
)

from rlhub.checkpoint.hf import Bucket, write_hf_weights
from rlhub.checkpoint.shard_reader import ShardReader
from rlhub.config.sections.sft import SFTConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig
from rlhub.engines.training.base import Rows, TrainEngine
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.registry import TRAIN_ENGINES
from rlhub.errors import CheckpointError
from rlhub.models.hf import SCALAR_HEAD, ModelKind, load_config, save_sidecars
from rlhub.models.lora import ADAPTER
from rlhub.models.shape import text_config
from rlhub.protocol.weights.fingerprint import nonfinite_names
from rlhub.protocol.weights.pieces import Piece
from rlhub.single_controller import Dispatch, Worker, register
from rlhub.workers.base import ADAPTER_FOLDER

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
class ExportedWeights:
    """The weights that an export has written.  dtype: the torch name of the dtype with the most bytes."""

    num_tensors: int
    num_bytes: int
    dtype: str


class ExportWorker(Worker):
    """Exports a checkpoint in one process, on the CPU."""

    def __init__(self, job: ExportJob) -> None:
        self.job = job
        self.dtype = None if job.dtype is None else DTYPES[job.dtype]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="checkpoint")
    def write(self) -> ExportedWeights:
        """Writes weights, configuration and tokenizer; holds one file's worth of weights at a time."""
        with ShardReader(self.job.folder) as reader:
            weights = StoredModel(reader, read_adapter(self.job.folder))
            kind = weights.kind
            save_sidecars(self.job.model, self.job.output, kind, dtype=self.dtype or weights.dtype)
            buckets = self._finite(weights.buckets())
            write_hf_weights(self.job.output, buckets, max_shard_bytes=self.job.max_shard_bytes, dtype=self.dtype)
            dtype = self.dtype or weights.dtype
            num_bytes = weights.num_elements * dtype.itemsize
            return ExportedWeights(num_tensors=len(weights.names), num_bytes=num_bytes, dtype=str(dtype).removeprefix("torch."))

    def _finite(self, buckets: Iterator[Bucket]) -> Iterator[Bucket]:
        """Yields the buckets; raises CheckpointError for one not finite in the dtype it is written in (fp16 ends at 65504)."""
        for bucket in buckets:
            cast = ((name, tensor if self.dtype is None else tensor.to(self.dtype)) for name, tensor in bucket)
            if found := nonfinite_names(cast):
                written = "" if self.dtype is None else f" in {self.job.dtype}"
                remedy = "export another checkpoint" + (", or in bf16 or fp32" if self.dtype == torch.float16 else "")
                raise CheckpointError(f"{self.job.folder}: {found[0]} is not finite{written}; {remedy}")
            yield bucket

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, deadline="checkpoint")
    def verify(self) -> Verification:
        """Compares plain transformers on the output with an engine that loads the checkpoint's own shards."""
        adapter = read_adapter(self.job.folder)
        model = replace(self.job.model, path=str(self.job.output), override_config={}, enable_gradient_checkpointing=False)
        if adapter is not None:
            model = replace(model, lora_rank=adapter.rank, lora_alpha=adapter.alpha, target_modules=adapter.targets)
        with ShardReader(self.job.folder) as reader:
            stored = StoredModel(reader, adapter)
            return verify_export(model, stored.kind, reader, stored_dtype=stored.dtype, dtype=self.dtype)


@dataclass(slots=True, kw_only=True, frozen=True)
class AdapterSettings:
    """Describes the LoRA adapters that a checkpoint holds next to the frozen weights.  targets: names of the adapted layers."""

    rank: int
    alpha: float
    targets: list[str]


def read_adapter(folder: Path) -> AdapterSettings | None:
    """Reads adapter_config.json; None where the checkpoint has no adapters."""
    path = folder / ADAPTER_FOLDER / "adapter_config.json"
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return AdapterSettings(rank=content["r"], alpha=content["lora_alpha"], targets=list(content["target_modules"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use an earlier checkpoint") from error


class StoredModel:
    """Reads the weights of a checkpoint's shards under their Hugging Face names, adapters merged."""

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
        if any("vision" in name for name in self.names):
            return "vla"
        return "value" if f"{SCALAR_HEAD}.weight" in self.names else "policy"

    @property
    def dtype(self) -> torch.dtype:
        """Master weights have one dtype."""
        return self.reader.dtype(WEIGHTS + self.names[0])

    @property
    def num_elements(self) -> int:
        return sum(torch.Size(self.reader.shape(WEIGHTS + name)).numel() for name in self.names)

    def buckets(self) -> Iterator[Bucket]:
        """Yields each weight by itself."""
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


CPU = torch.device("cpu")
NUM_ROWS, NUM_TOKENS = 4, 33
ALLOWED = 1e-3
"""Largest difference of log-probs, entropies or values in float32, whose rounding in another order stays well below it; as a
share of the largest of them where that is above 1."""
ALLOWED_OF_ROUNDED_ADAPTERS = 0.1
"""The same where merged weights were rounded to 16 bits, which weights and adapters apart cannot follow."""
WEIGHTS, ADAPTERS = "model.", ".lora_"
"""The prefix of weights' names in a checkpoint, and the part that marks adapters in them."""
OUTPUTS: dict[ModelKind, tuple[str, ...]] = {"policy": ("log_probs", "entropy"), "value": ("values",)}


@dataclass(slots=True, kw_only=True, frozen=True)
class Verification:
    """compared: names of the outputs.  first_difference: of the weights, in words; None: all are equal, bit for bit."""

    compared: str
    num_tokens: int
    difference: float
    allowed: float
    num_weights: int
    first_difference: str | None


def verify_export(
    model: ModelConfig, kind: ModelKind, reader: ShardReader, *, stored_dtype: torch.dtype, dtype: torch.dtype | None
) -> Verification:
    """model: path is the exported folder, LoRA as it was trained.  dtype: what the export was rounded to, None: nothing."""
    exact = torch.float64 if stored_dtype == torch.float64 else torch.float32
    rounded = dtype or stored_dtype
    has_adapters = model.lora_rank > 0
    rows = _rows(text_config(load_config(model)).to_dict())
    if (lost := _first_lost(reader, Path(str(model.path)))) is not None:  # no engine takes such a folder
        return Verification(
            compared=" and ".join(OUTPUTS[kind]),
            num_tokens=int(rows["response_mask"].sum()),
            difference=math.inf,
            allowed=ALLOWED,
            num_weights=0,
            first_difference=f"{lost}: the checkpoint has it, the export does not",
        )
    if kind == "vla":
        return _verify_reading_pictures(model, reader, exact, rounded, rows)
    engine = _engine(model, kind, exact)
    engine.load_state(_reading(reader, None if has_adapters else rounded))
    passed = engine.infer(rows, outputs=OUTPUTS[kind])
    plain = _plain_outputs(model, kind, exact, rows["input_ids"])
    difference = max(float((passed[name].double() - plain[name].double()).abs().max()) for name in OUTPUTS[kind])
    allowed = ALLOWED_OF_ROUNDED_ADAPTERS if has_adapters and rounded != exact else ALLOWED
    num_weights, first = _compare_weights(engine, Path(str(model.path)), rounded)
    return Verification(
        compared=" and ".join(OUTPUTS[kind]),
        num_tokens=int(rows["response_mask"].sum()),
        difference=difference,
        allowed=allowed * max(1.0, *(float(plain[name].abs().max()) for name in OUTPUTS[kind])),
        num_weights=num_weights,
        first_difference=first,
    )


@torch.no_grad()
def _verify_reading_pictures(
    model: ModelConfig, reader: ShardReader, exact: torch.dtype, rounded: torch.dtype, rows: Rows
) -> Verification:
    """Compares transformers' own model of the folder with one of the checkpoint's weights, which have the same architecture: text
    alone goes through both, and each weight is compared, those for pictures too."""
    plain = AutoModelForImageTextToText.from_pretrained(model.path, dtype=exact, trust_remote_code=model.trust_remote_code).eval()
    stored = AutoModelForImageTextToText.from_config(plain.config, dtype=exact, trust_remote_code=model.trust_remote_code).eval()
    weights = {name.removeprefix(WEIGHTS): reader.whole(name).to(rounded) for name in reader.names() if name.startswith(WEIGHTS)}
    stored.load_state_dict({name: weights.get(name, weight) for name, weight in stored.state_dict().items()})
    stored.tie_weights()
    expected = found = torch.zeros(1)
    if not isinstance(plain, PI0ForConditionalGeneration):  # which does not run without pictures
        expected, found = (built(input_ids=rows["input_ids"]).logits.log_softmax(-1).double() for built in (stored, plain))
    exported = dict(_exported(Path(str(model.path))))
    first = next(
        (f"{name}: {text}" for name in weights if (text := _difference(exported[name](), weights[name])) is not None), None
    )
    return Verification(
        compared="weights" if expected is found else "log_probs of text",
        num_tokens=int(rows["response_mask"].sum()),
        difference=float((found - expected).abs().max()),
        allowed=ALLOWED * max(1.0, float(expected.abs().max())),
        num_weights=len(weights),
        first_difference=first,
    )


def _first_lost(reader: ShardReader, folder: Path) -> str | None:
    """Returns a weight of the checkpoint that the exported files do not have; adapters are merged there."""
    exported = {name for name, _ in _exported(folder)}
    stored = (name.removeprefix(WEIGHTS) for name in reader.names() if name.startswith(WEIGHTS))
    return next((name for name in stored if name not in exported and ADAPTERS not in name), None)


def _engine(model: ModelConfig, kind: ModelKind, dtype: torch.dtype) -> TrainEngine:
    """Returns the default engine, without optimizer; the weights it starts from are all replaced by the checkpoint's."""
    ensure_process_group(CPU)
    section = FSDPConfig(model_dtype="fp64" if dtype == torch.float64 else "fp32")
    engine = TRAIN_ENGINES.get(SFTConfig().strategy)(model, section, None, kind=kind, device=CPU)
    engine.initialize()
    return engine


def _reading(reader: ShardReader, rounded: torch.dtype | None) -> Callable[[Piece], Tensor]:
    """Returns stored regions, rounded as the export's are, in the dtype the engine computes in."""

    def read(piece: Piece) -> Tensor:
        stored = reader.region(piece.name, piece.region)
        return stored.to(rounded or stored.dtype).to(piece.tensor.dtype)

    return read


def _rows(config: Mapping[str, Any]) -> Rows:
    """Returns random tokens, the same each time: every weight takes part, whatever the tokenizer."""
    length = min(NUM_TOKENS, config.get("max_position_embeddings") or NUM_TOKENS)
    ids = torch.randint(0, int(config["vocab_size"]), (NUM_ROWS, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    return {"input_ids": ids, "attention_mask": mask, "response_mask": mask[:, 1:]}


@torch.no_grad()
def _plain_outputs(model: ModelConfig, kind: ModelKind, dtype: torch.dtype, ids: Tensor) -> dict[str, Tensor]:
    """Returns the outputs of transformers' own model of the folder, by the textbook."""
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": model.trust_remote_code}
    if kind == "policy":
        log_p = AutoModelForCausalLM.from_pretrained(model.path, **options).eval()(ids).logits[:, :-1].log_softmax(-1)
        log_probs = log_p.gather(-1, ids[:, 1:, None])[..., 0]
        return {"log_probs": log_probs, "entropy": -(log_p.exp() * log_p).sum(-1)}
    built = AutoModelForSequenceClassification.from_pretrained(model.path, **options).eval()
    return {"values": built.score(built.base_model(ids).last_hidden_state)[:, :-1, 0]}


def _compare_weights(engine: TrainEngine, folder: Path, rounded: torch.dtype) -> tuple[int, str | None]:
    """Returns (how many were compared, the first that differs in words): the engine's weights against the exported files."""
    exported = dict(_exported(folder))
    count = 0
    for bucket in engine.named_weights():
        for name, weight in bucket:
            if name not in exported:
                return count, f"{name}: the checkpoint has it, the export does not"
            if (difference := _difference(exported.pop(name)(), weight.to(rounded))) is not None:
                return count, f"{name}: {difference}"
            count += 1
    return count, f"{min(exported)}: the export has it, the checkpoint does not" if exported else None


def _exported(folder: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    for path in sorted(folder.glob("*.safetensors")):
        handle: Any = safe_open(str(path), framework="pt")
        for name in handle.keys():
            yield name, partial(handle.get_tensor, name)


def _difference(exported: Tensor, weight: Tensor) -> str | None:
    if exported.shape != weight.shape or exported.dtype != weight.dtype:
        found = f"{exported.dtype} {tuple(exported.shape)} exported"
        return f"{found}, {weight.dtype} {tuple(weight.shape)} in the checkpoint"
    unequal = (exported != weight) & ~(exported.isnan() & weight.isnan())
    if not unequal.any():
        return None
    place = tuple(int(index) for index in unequal.nonzero()[0])
    values = f"{float(exported[place]):g} exported, {float(weight[place]):g} in the checkpoint"
    return f"{int(unequal.sum())} of {unequal.numel()} elements differ, the first at {list(place)}: {values}"
