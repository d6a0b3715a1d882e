"""The continuous batch of the vllm engine: vLLM's own scheduler, stepped in this process.  Imports vLLM: see `environment`.

The engine core is driven directly.  LLMEngine's layer above it makes an output object for every request and token, text
included, which nobody reads here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from vllm import LLM
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as CoreFinishReason

from rlhub.engines.rollout.base import FinishReason, GenerationRequest, SamplingParams
from rlhub.engines.rollout.stepping import TokenEvent
from rlhub.engines.rollout.vllm.params import vllm_params
from rlhub.errors import EngineError

REASONS: dict[CoreFinishReason, FinishReason] = {CoreFinishReason.STOP: "stop", CoreFinishReason.LENGTH: "length"}


class VLLMStepper:
    """`Stepper` over the engine core of `llm`."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.llm_engine
        self._core: Any = llm.llm_engine.engine_core
        self._running: set[int] = set()
        if self._core.engine_core.batch_queue is not None:
            raise EngineError(
                "vLLM schedules a step ahead of the one that runs, so single requests could not be interrupted between two: "
                "set rollout.mode=async"
            )

    def add(self, key: int, request: GenerationRequest, params: SamplingParams) -> None:
        self._core.add_request(
            self._engine.input_processor.process_inputs(
                str(key),
                {"prompt_token_ids": list(request.prompt_ids)},
                vllm_params(request, params),
                supported_tasks=self._engine.get_supported_tasks(),
            )
        )
        self._running.add(key)

    def step(self) -> Sequence[TokenEvent]:
        return [event for output in self._core.get_output().outputs for event in self._events(output)]

    def _events(self, output: EngineCoreOutput) -> list[TokenEvent]:
        """One event a token: one, or none while a long prompt is read."""
        key = int(output.request_id)
        reason = None if output.finish_reason is None else _reason(output.finish_reason)
        tokens = output.new_token_ids
        log_probs = [0.0] * len(tokens) if output.new_logprobs is None else output.new_logprobs.logprobs[:, 0].tolist()
        if reason is not None:
            self._running.discard(key)
        last = len(tokens) - 1
        return [
            TokenEvent(key, token, log_prob, reason if i == last else None)
            for i, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True))
        ]

    def remove(self, keys: Collection[int]) -> None:
        """Those that ended are unknown to the core."""
        known = self._running.intersection(keys)
        self._core.abort_requests([str(key) for key in known])
        self._running -= known

    def recompute(self) -> None:
        """All running requests go back to the waiting ones, which have no keys and values."""
        if not self._core.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not give up the keys and values of the running requests")


def _reason(reason: CoreFinishReason) -> FinishReason:
    if reason not in REASONS:
        raise EngineError(f"vLLM ended a request with {reason}")
    return REASONS[reason]
