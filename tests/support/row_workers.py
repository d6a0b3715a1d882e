"""A worker whose methods make, read and extend rows, for tests of batches held by reference; worker processes import it."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from rlhub.engines.training.collectives import ensure_process_group
from rlhub.protocol import DataProto
from rlhub.single_controller import Dispatch, Worker, make_nd_compute_dataproto_dispatch_fn, register

REST_S = 60.0
ROWS_MESH = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")


class RowWorker(Worker):
    """tp: ranks that share one part."""

    def __init__(self, tp: int = 1) -> None:
        self._register_dispatch_collect_info("actor", self.rank // tp, self.rank % tp == 0)

    @register(Dispatch.ONE_TO_ALL)
    def join(self) -> None:
        ensure_process_group(torch.device("cpu"), timeout_s=300.0)

    @register(ROWS_MESH)
    def generate(self, prompts: DataProto) -> DataProto:
        """Two samples a prompt: as many tokens as the prompt's number says, ragged and padded."""
        numbers = prompts.batch["number"].repeat_interleave(2) * 10 + torch.arange(2).repeat(len(prompts))
        rows = [torch.arange(int(number) % 7) + number for number in numbers]
        columns = {
            "padded": numbers[:, None] * torch.ones(1, 4, dtype=torch.int64),
            "keep": numbers[:, None] % torch.tensor([2, 3]) == 0,
            "length": torch.tensor([len(row) for row in rows], dtype=torch.int64),
            "made_by": torch.full((len(rows),), self.rank),
        }
        if rows:
            columns["tokens"] = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return DataProto.from_dict(columns, meta_info={"metrics": {"rows": len(rows)}})

    @register(ROWS_MESH)
    async def add_up(self, batch: DataProto, factor: int = 1) -> DataProto:
        """The sums of each row's tokens, wide and small; what it reads it must not write."""
        sums = torch.stack([row.sum() * factor for row in batch.batch["tokens"].unbind()])
        wide = batch.batch["padded"] * factor
        return DataProto.from_dict({"sum": sums, "wide": wide, "rank": torch.full((len(batch),), self.rank)})

    @register(Dispatch.ONE_TO_ALL)
    def sums_of_all_ranks(self, batch: DataProto) -> int:
        """The sum of what this rank has in column `wide`: all ranks need all rows."""
        return int(batch.batch["wide"].sum())

    @register(Dispatch.ONE_TO_ALL)
    def rest(self, until: str) -> None:
        """Is busy until there is a file of that name, or for REST_S where somebody waits for it to be over."""
        deadline = time.monotonic() + REST_S
        while not Path(until).exists() and time.monotonic() < deadline:
            time.sleep(0.01)

    @register(ROWS_MESH)
    def read(self, batch: DataProto) -> DataProto:
        return batch

    @register(ROWS_MESH)
    def spoil(self, batch: DataProto) -> DataProto:
        batch.batch["padded"].zero_()
        return batch


class Echo(Worker):
    """An asynchronous actor that returns what it gets."""

    async def echo(self, value: bytes) -> bytes:
        return value
