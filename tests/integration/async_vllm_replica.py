"""A replica over vLLM's AsyncLLM that can be looked into, and what the tests run inside its processes."""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, SamplingParams
from rlhub.engines.rollout.vllm.async_engine import AsyncVLLMEngine
from rlhub.protocol.weights.pieces import Piece
from rlhub.rollout_service.server import RolloutServer, UpdateReport
from rlhub.rollout_service.weights_folder import FolderReader
from rlhub.sharding_manager import reader as reading
from rlhub.sharding_manager.route import SyncReport
from rlhub.sharding_manager.versions import FolderVersion
from tests.support.step_limit import ENGINES, LIMIT_S, VARIABLE, StepLimit

LIMIT_AT = 20
"""Tokens, of those that requests may get."""
HERE = "tests.integration.async_vllm_replica"


class AtPlacing:
    """A reader that waits between the pause and the copying.  begun: it waits; it goes on with `go`."""

    def __init__(self, reader: FolderReader) -> None:
        self.prepare, self._reader = reader.prepare, reader
        self.begun, self.go = threading.Event(), threading.Event()

    def place(self, mapped: Any) -> SyncReport:
        self.begun.set()
        assert self.go.wait(LIMIT_S)
        return self._reader.place(mapped)


class LookedInto(RolloutServer):
    """With the engine itself at hand, whose steps can be held."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        importlib.import_module(ENGINES)
        self.limit = StepLimit(Path(os.environ[VARIABLE]))

    @property
    def vllm(self) -> AsyncVLLMEngine:
        assert isinstance(self.engine, AsyncVLLMEngine)
        return self.engine

    async def interrupt(
        self,
        wanted: list[GenerationRequest],
        late: GenerationRequest,
        params: SamplingParams,
        folder: str,
        version: int,
        recompute: bool,
    ) -> tuple[list[Completion], Completion, list[list[Progress]], UpdateReport]:
        """New weights while all of `wanted` run; `late` comes during the update.  What each was told as it ran, too."""
        self.config.rollout.recompute_kv_cache = recompute
        told: list[list[Progress]] = [[] for _ in wanted]
        self.limit.set(0)
        tasks = [
            asyncio.create_task(self.vllm.agenerate(request, params, heard.append))
            for request, heard in zip(wanted, told, strict=True)
        ]
        await self.limit.reached(0, len(tasks))
        self.limit.set(LIMIT_AT)
        while not all(told):
            await asyncio.sleep(0.001)
        reader = self._reader(folder)
        self._readers[folder] = update = AtPlacing(reader)  # type: ignore[assignment]
        updating = asyncio.create_task(self.update_weights(folder, version))
        assert await asyncio.to_thread(update.begun.wait, LIMIT_S)
        last = asyncio.create_task(self.agenerate(late, params))
        await asyncio.sleep(0)
        assert self.vllm.load == len(wanted) + 1, "the requests ended before the update"
        self.limit.lift()
        update.go.set()
        report = await updating
        self._readers[folder] = reader
        return list(await asyncio.gather(*tasks)), await last, told, report

    async def part(self, request: GenerationRequest, params: SamplingParams, how: str) -> tuple[Completion | None, int]:
        """What there is of a request that ends early, and the engine's load after it."""
        told: list[Progress] = []
        self.limit.set(LIMIT_AT)
        task = asyncio.create_task(self.vllm.agenerate(request, params, told.append))
        while not told:
            await asyncio.sleep(0.001)
        completion = None
        if how == "a follower that raises":
            task.cancel()
            with pytest.raises(ZeroDivisionError):
                await self.vllm.agenerate(request, params, lambda progress: 1 / 0)  # type: ignore[arg-type]
        elif how == "cancel":
            task.cancel()
            await asyncio.wait([task])
        else:
            if how == "abort while paused":
                await self.pause()
            await self.abort(["nobody", request.request_id])
            completion = await asyncio.wait_for(task, LIMIT_S)
            await self.resume()
        self.limit.lift()
        while self.vllm.load:
            await asyncio.sleep(0.001)
        return completion, self.vllm._running()._llm.output_processor.get_num_unfinished_requests()

    async def in_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Of Inside."""
        return list(await asyncio.to_thread(self.vllm.call_workers, f"{HERE}:Inside", method, *arguments))

    async def processes(self) -> list[int]:
        return [child.pid for child in psutil.Process().children(recursive=True)]


class Inside:
    """In a worker of vLLM's."""

    def __init__(self, weights: Any) -> None:
        self._weights = weights

    def held(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """Names, shapes here, shapes of the whole."""
        return [(piece.name, tuple(piece.tensor.shape), piece.shape) for piece in self._weights.live_weights()]

    def flip_at_next_update(self, name: str, there: bool) -> None:
        """Change one element of the standby weights between writing and comparing them, in the last worker or in none."""
        fill, original = reading.WeightReader._fill, reading.digests

        def filling(reader: reading.WeightReader, found: FolderVersion, standby: list[Piece]) -> Any:
            def flipping(tensors: Iterable[Tensor]) -> list[int]:
                if there:
                    flip(next(piece for piece in standby if piece.name == name))
                return original(tensors)

            reading.digests = flipping
            try:
                return fill(reader, found, standby)
            finally:
                reading.digests, reading.WeightReader._fill = original, fill  # type: ignore[method-assign]

        reading.WeightReader._fill = filling  # type: ignore[method-assign]


def flip(piece: Piece) -> None:
    """Change the last element of a piece, but not in the first worker."""
    if any(start > 0 for start, _ in piece.region):
        index = (piece.tensor.shape[0] - 1, *([0] * (piece.tensor.dim() - 1)))
        piece.tensor[index] = torch.nextafter(piece.tensor[index], torch.tensor(torch.inf))
