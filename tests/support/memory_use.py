"""A process that trains one model on CPU, and the memory that it takes for it: python -m tests.support.memory_use MODEL ...

It writes the bytes by which the process's own memory has grown, at most, in the second of two updates, when the optimizer's
states are there.  A tiny model is trained first, so that libraries and their buffers are not counted.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.config.sections.training import FSDPConfig, ModelConfig, OptimConfig
from rlhub.engines.training.base import ForwardOutputs, LossOutput, Rows, TrainEngine
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.engines.training.micro_batch import MicroBatchConfig
from scripts.bench.tiny_model import build

VOCABULARY = 8000
RESULT = "bytes"


def status_bytes(name: str) -> int:
    """What the kernel says of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024


def own_bytes() -> int:
    """Resident memory without files that are mapped, such as libraries and weights."""
    return status_bytes("RssAnon")


class Peak:
    """The most memory that the process has inside the context, by the mark that the kernel keeps: a thread that looks again and
    again can miss it where it gets no core.  Files that are mapped are taken to be as large as at the end."""

    def __enter__(self) -> Peak:
        self.bytes = 0
        Path("/proc/self/clear_refs").write_text("5")  # the mark begins anew: proc(5)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.bytes = status_bytes("VmHWM") - status_bytes("VmRSS") + own_bytes()


def loss(outputs: ForwardOutputs, micro: Rows) -> LossOutput:
    assert outputs.log_probs is not None
    return LossOutput(loss=-(outputs.log_probs * micro["response_mask"]).sum(), sums={})


def rows_of(count: int, prompt: int, response: int) -> dict[str, Tensor]:
    ids = torch.randint(0, VOCABULARY, (count, prompt + response))
    mask = torch.ones_like(ids)
    positions = torch.arange(prompt + response).expand_as(ids).contiguous()
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "responses": ids[:, prompt:].contiguous()}
    return {**columns, "response_mask": mask[:, prompt:].float()}


def engine_for(folder: Path, recompute: Any, rows: int) -> TrainEngine:
    engine = FSDPEngine(
        ModelConfig(path=str(folder)),
        FSDPConfig(recompute_granularity=recompute),
        OptimConfig(),
        kind="policy",
        device=torch.device("cpu"),
        micro_batch=MicroBatchConfig(rows=rows),
    )
    engine.initialize()
    return engine


def update(engine: TrainEngine, rows: dict[str, Tensor]) -> None:
    engine.forward_backward(rows, loss)
    engine.optimizer_step()


def main(folder: str, recompute: str, mini: str, micro: str, prompt: str, response: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tiny = Path(folder) / "tiny"
    build(tiny, hidden=64, layers=1, vocab_size=VOCABULARY)
    update(engine_for(tiny, recompute, 2), rows_of(4, 8, 8))
    gc.collect()
    before = own_bytes()
    engine, rows = engine_for(Path(folder), recompute, int(micro)), rows_of(int(mini), int(prompt), int(response))
    update(engine, rows)
    with Peak() as peak:
        update(engine, rows)
    (Path(folder) / RESULT).write_text(str(peak.bytes - before))


if __name__ == "__main__":
    main(*sys.argv[1:])
