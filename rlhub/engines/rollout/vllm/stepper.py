"""The continuous batch of the vllm engine: vLLM's own scheduler, stepped in this process.  Imports vLLM: see `environment`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm.v1.engine import EngineCoreOutput

from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.engines.rollout.stepping import TokenEvent
from rlhub.engines.rollout.vllm.core import Core, finish_reason_of, log_probs_of
from rlhub.errors import EngineError


class VLLMStepper:
    """`Stepper` over the engine core."""

    def __init__(self, core: Core) -> None:
        if core.runs_ahead:
            raise EngineError(
                "vLLM schedules a step ahead of the one that runs, so single requests could not be interrupted between two: "
                "set rollout.mode=async"
            )
        self._core = core
        self._running: set[int] = set()

    def add(self, key: int, request: GenerationRequest, params: SamplingParams) -> None:
        self._core.add(str(key), request, params)
        self._running.add(key)

    def step(self) -> Sequence[TokenEvent]:
        return [event for output in self._core.step() for event in self._events(output)]

    def _events(self, output: EngineCoreOutput) -> list[TokenEvent]:
        """One event a token: one, or none while a long prompt is read."""
        key = int(output.request_id)
        reason = finish_reason_of(output)
        tokens = output.new_token_ids
        log_probs = log_probs_of(output) or [0.0] * len(tokens)
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
        self._core.abort([str(key) for key in known])
        self._running -= known

    def recompute(self) -> None:
        self._core.recompute()
