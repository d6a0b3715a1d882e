"""vLLM's AsyncLLMEngine: an engine core in a child process, and with tensor parallelism a worker process a rank below it.

Imports vLLM: see `environment`.  All methods run on one event loop.  The engine core imports this module to know its executor's
class, and watches its owner from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import torch
from vllm import AsyncEngineArgs, AsyncLLMEngine, CompletionOutput, RequestOutput
from vllm.inputs import tokens_input

from rlhub.engines.rollout.base import Completion, FinishReason, GenerationRequest, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.vllm.arguments import engine_arguments
from rlhub.engines.rollout.vllm.conversion import finish_reason_of, log_probs_of, vllm_params
from rlhub.engines.rollout.vllm.environment import end_with_owner
from rlhub.engines.rollout.vllm.internals import MultiprocExecutor, UniProcExecutor
from rlhub.errors import EngineError

EXTENSION = "rlhub.engines.rollout.vllm.worker.WorkerExtension"
SHUTDOWN_S = 30.0  # a process that is killed leaves its shared memory behind
OnTokens = Callable[[list[int], list[float], FinishReason | None], None]
"""Called with new tokens, their log-probs (none where they were not asked for) and, with the last ones, why they end."""


class CoreExecutor(UniProcExecutor):  # type: ignore[misc]  # vLLM's types are not read
    """The model is in the engine core."""


class WorkersExecutor(MultiprocExecutor):  # type: ignore[misc]
    """The model's parts are in worker processes."""


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
        self._llm = AsyncLLMEngine(
            vllm_config=arguments.create_engine_config(),
            executor_class=WorkersExecutor if parallel else CoreExecutor,
            log_stats=False,
            log_requests=False,
        )
        self._entry = asyncio.Lock()  # no request is on its way to the core while it is paused

    async def generate(
        self, key: str, request: GenerationRequest, params: SamplingParams, salt: str, on_tokens: OnTokens | None
    ) -> Completion:
        """Generates one completion.  salt: requests with another share no cached prefix with this one.  Cancelling ends the
        request."""
        sampling = vllm_params(request, params, stream=on_tokens is not None)
        prompt = tokens_input(list(request.prompt_ids), cache_salt=salt)
        try:
            async with self._entry:
                queue = await self._llm.add_request(key, prompt, sampling)
            answer = _Answer(params, on_tokens)
            while not answer.add(queue.get_nowait() or await queue.get()):
                pass
            return answer.completion()
        except (asyncio.CancelledError, EngineError):
            await self._llm.abort(key)
            raise

    async def abort(self, keys: list[str]) -> None:
        """Ends these requests, whose completions have the tokens so far.  Unknown keys are passed over."""
        await self._llm.abort(keys)

    async def pause(self) -> None:
        """Stops between two steps; on return none is computing.  Requests keep their tokens."""
        async with self._entry:
            await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self, *, recompute: bool) -> None:
        """Steps again.  recompute: all requests lose their keys and values first."""
        if recompute and not await self._llm.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not give up the keys and values of the running requests")
        await self._llm.resume_generation()

    async def set_version(self, version: int) -> None:
        """Marks the tokens of later steps with this version."""
        await self._llm.update_weight_version(str(version))

    async def call_workers(self, target: str, method: str, arguments: bytes) -> list[bytes]:
        """Calls WorkerExtension.rlhub_call between two steps; returns one reply a worker."""
        replies: list[bytes] = await self._llm.collective_rpc("rlhub_call", args=(target, method, arguments))
        return replies

    @property
    def vocab_size(self) -> int:
        """The number of token ids that the model reads."""
        return int(self._llm.model_config.get_vocab_size())

    @property
    def dead(self) -> bool:
        """Whether one of its processes has ended."""
        return bool(self._llm.errored)

    def close(self) -> None:
        """Ends the processes; blocks until they have ended."""
        self._llm.shutdown(timeout=SHUTDOWN_S)


class _Answer:
    """What comes for one request: its tokens as they come, or all at the end."""

    def __init__(self, params: SamplingParams, on_tokens: OnTokens | None) -> None:
        self._params, self._on_tokens = params, on_tokens
        self._tokens: list[int] = []
        self._log_probs: list[float] = []
        self._last: CompletionOutput | None = None

    def add(self, output: RequestOutput) -> bool:
        """Takes an output; returns whether it was the last."""
        self._last = part = output.outputs[0]
        tokens, log_probs = list(part.token_ids), log_probs_of(part)
        log_probs = log_probs if self._params.log_probs else []
        self._tokens += tokens
        self._log_probs += log_probs
        if self._on_tokens is not None and tokens:
            self._on_tokens(tokens, log_probs, finish_reason_of(part) if output.finished else None)
        return bool(output.finished)

    def completion(self) -> Completion:
        """Returns the completion, once the last output was taken."""
        assert self._last is not None
        versions = [int(span.version) for span in self._last.weight_versions or () for _ in range(span.start, span.end)]
        if len(versions) != len(self._tokens):
            raise EngineError(f"vLLM returned {len(versions)} versions for {len(self._tokens)} tokens")
        reason = finish_reason_of(self._last)
        return Completion(token_ids=self._tokens, log_probs=self._log_probs, finish_reason=reason, versions=versions)


end_with_owner()
