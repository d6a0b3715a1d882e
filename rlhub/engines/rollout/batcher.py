"""Turns a blocking batch `generate` into concurrent single requests on an event loop.

Requests that are waiting when the engine becomes free are generated together, in one batch per set of sampling
parameters.  Engines whose library has no event loop of its own use this for `agenerate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams

BatchGenerate = Callable[[Sequence[GenerationRequest], SamplingParams], list[Completion]]


@dataclass(slots=True, kw_only=True)
class _Waiting:
    request: GenerationRequest
    params: SamplingParams
    result: asyncio.Future[Completion]


class RequestBatcher:
    """One per engine.  The engine's `generate` runs in a thread, one batch at a time."""

    def __init__(self, generate: BatchGenerate) -> None:
        self._generate = generate
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def submit(self, request: GenerationRequest, params: SamplingParams) -> Completion:
        """Queue one request and wait for its completion; an error of its batch is raised here."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request=request, params=params, result=loop.create_future())
        self._waiting.append(waiting)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._serve())
        return await waiting.result

    async def _serve(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # lets requests of the same turn of the loop join the batch
            params = self._waiting[0].params
            batch = [item for item in self._waiting if item.params == params and not item.result.done()]
            self._waiting = [item for item in self._waiting if item.params != params and not item.result.done()]
            if batch:
                await self._run(batch, params)

    async def _run(self, batch: list[_Waiting], params: SamplingParams) -> None:
        try:
            completions = await asyncio.to_thread(self._generate, [item.request for item in batch], params)
        except Exception as error:  # noqa: BLE001  the thread is a boundary: its error belongs to the waiting callers
            for item in batch:
                if not item.result.done():
                    item.result.set_exception(error)
            return
        for item, completion in zip(batch, completions, strict=True):
            if not item.result.done():
                item.result.set_result(completion)
