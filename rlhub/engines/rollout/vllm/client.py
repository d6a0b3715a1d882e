"""vLLM's AsyncLLM: an engine core in a child process, and with tensor parallelism a worker process a rank below it.

Imports vLLM: see `environment`.  All methods run on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from rlhub.engines.rollout.base import Completion, FinishReason, GenerationRequest, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm.arguments import engine_arguments
from rlhub.engines.rollout.vllm.core import refuse_nonfinite_log_probs
from rlhub.engines.rollout.vllm.executors import CoreExecutor, WorkersExecutor
from rlhub.engines.rollout.vllm.params import vllm_params
from rlhub.errors import EngineError

EXTENSION = "rlhub.engines.rollout.vllm.worker.WorkerExtension"
SHUTDOWN_S = 30.0  # a process that is killed leaves its shared memory behind
Told = Callable[[list[int], list[float], FinishReason | None], None]
"""Told of new tokens, their log-probs (none where they were not asked for) and, with the last ones, why they end."""


class AsyncClient:
    """See the module docstring.  Built on the loop, which it blocks while the processes start."""

    def __init__(self, setup: RolloutSetup, dtype: torch.dtype) -> None:
        parallel = setup.config.tensor_model_parallel_size > 1
        arguments = AsyncEngineArgs(
            **engine_arguments(setup, dtype),
            # Chosen here: in a Ray actor vLLM would start workers that are Ray actors too.
            distributed_executor_backend="mp" if parallel else "uni",
            worker_extension_cls=EXTENSION,
        )
        self._llm = AsyncLLM(
            vllm_config=arguments.create_engine_config(),
            executor_class=WorkersExecutor if parallel else CoreExecutor,
            log_stats=False,
            log_requests=False,
        )
        self._entry = asyncio.Lock()  # no request is on its way to the core while it is paused

    async def generate(
        self, key: str, request: GenerationRequest, params: SamplingParams, salt: str, told: Told | None
    ) -> Completion:
        """salt: requests with another share no cached prefix with this one.  Cancelling ends the request."""
        sampling = vllm_params(request, params)
        sampling.output_kind = RequestOutputKind.FINAL_ONLY if told is None else RequestOutputKind.DELTA
        prompt = tokens_input(list(request.prompt_ids), cache_salt=salt)
        try:
            async with self._entry:
                queue = await self._llm.add_request(key, prompt, sampling)
            answer = _Answer(params, told)
            while not answer.add(queue.get_nowait() or await queue.get()):
                pass
            return answer.completion()
        except (asyncio.CancelledError, EngineError):
            await self._llm.abort(key)
            raise

    async def abort(self, keys: list[str]) -> None:
        """Their completions have the tokens so far.  Unknown keys are passed over."""
        await self._llm.abort(keys)

    async def pause(self) -> None:
        """No step is under way on return; requests keep their tokens."""
        async with self._entry:
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self, *, recompute: bool) -> None:
        """recompute: all requests lose their keys and values first."""
        if recompute and not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not give up the keys and values of the running requests")
        await self._llm.resume_generation()

    async def set_version(self, version: int) -> None:
        """Tokens of later steps belong to it."""
        await self._llm.update_weight_version(str(version))

    async def call_workers(self, target: str, method: str, arguments: bytes) -> list[bytes]:
        """See WorkerExtension.rlhub_call; one reply a worker.  Between two steps."""
        replies: list[bytes] = await self._llm.collective_rpc("rlhub_call", args=(target, method, arguments))
        return replies

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return int(self._llm.model_config.get_vocab_size())

    @property
    def dead(self) -> bool:
        """Whether one of its processes has ended."""
        return bool(self._llm.errored)

    def close(self) -> None:
        """End the processes; blocks until they have ended."""
        self._llm.shutdown(timeout=SHUTDOWN_S)


class _Answer:
    """What comes for one request: its tokens as they come, or all at the end."""

    def __init__(self, params: SamplingParams, told: Told | None) -> None:
        self._params, self._told = params, told
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self._last: CompletionOutput | None = None

    def add(self, output: RequestOutput) -> bool:
        """Whether it was the last."""
        part = output.outputs[0]
        tokens = list(part.token_ids)
        log_probs = list(part.logprobs.logprobs) if part.logprobs else []
        refuse_nonfinite_log_probs(log_probs)
        log_probs = log_probs if self._params.log_probs else []
        self._tokens += tokens
        self._log_probs += log_probs
        self._last = part
        if self._told is not None and tokens:
            self._told(tokens, log_probs, part.finish_reason if output.finished else None)
        return bool(output.finished)

    def completion(self) -> Completion:
        assert self._last is not None
        tokens, log_probs = self._tokens, self._log_probs
        versions = [int(span.version) for span in self._last.weight_versions or () for _ in range(span.start, span.end)]
        if len(versions) != len(tokens) or (self._params.log_probs and len(log_probs) != len(tokens)):
            counts = f"{len(log_probs)} log-probabilities and {len(versions)} versions"
            raise EngineError(f"vLLM returned {counts} for {len(tokens)} tokens")
        return Completion(token_ids=tokens, log_probs=log_probs, finish_reason=self._last.finish_reason, versions=versions)
