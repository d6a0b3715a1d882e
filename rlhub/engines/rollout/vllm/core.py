"""vLLM's engine core of this process, driven directly.  Imports vLLM: see `environment`.

LLMEngine's layer above it makes an output object for every request and token, text included, which nobody reads here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

import torch
from vllm import LLM
from vllm.inputs.engine import tokens_input
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine import FinishReason as CoreFinishReason

from rlhub.engines.rollout.base import FinishReason, GenerationRequest, SamplingParams
from rlhub.engines.rollout.vllm.environment import agree_on_stream, agree_on_threads
from rlhub.engines.rollout.vllm.params import vllm_params
from rlhub.errors import EngineError

REASONS: dict[CoreFinishReason, FinishReason] = {CoreFinishReason.STOP: "stop", CoreFinishReason.LENGTH: "length"}


class Core:
    """The engine core of `llm`, which was built on `stream`.  Names of requests must differ among those that wait or run."""

    def __init__(self, llm: LLM, stream: torch.cuda.Stream | None) -> None:
        self._engine = llm.llm_engine
        self._client: Any = llm.llm_engine.engine_core
        self._stream = stream
        self._failure: BaseException | None = None

    @property
    def failure(self) -> str:
        """Of a step, after which no request is taken; "" without."""
        return "" if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"

    @property
    def runs_ahead(self) -> bool:
        """Whether a step is scheduled before the one before it has ended."""
        return self._client.engine_core.batch_queue is not None

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run, or ended and the model holds them still, or a step is under way."""
        core = self._client.engine_core
        return core.scheduler.has_requests() or bool(core.batch_queue)

    def add(self, name: str, request: GenerationRequest, params: SamplingParams) -> None:
        """Take a checked request; it joins at the next step."""
        if self._failure is not None:
            raise EngineError(f"vLLM failed in a step and must be built anew: {self._failure}") from self._failure
        self._client.add_request(
            self._engine.input_processor.process_inputs(
                name,
                tokens_input(list(request.prompt_ids)),
                vllm_params(request, params),
                supported_tasks=self._engine.get_supported_tasks(),
            )
        )

    def step(self) -> list[EngineCoreOutput]:
        """One step; what it yields may be of an earlier one, or nothing, where the core runs ahead.

        After an error no request is taken any more: the scheduler believes that the step was computed, and has cached it.
        """
        agree_on_threads()
        agree_on_stream(self._stream)
        try:
            outputs: list[EngineCoreOutput] = self._client.get_output().outputs
        except BaseException as error:
            self._failure = error
            raise
        return outputs

    def abort(self, names: Collection[str]) -> None:
        """Those that ended are passed over."""
        self._client.abort_requests(list(names))

    def drain(self) -> None:
        """After an abort: until nothing is left of the requests.  Yields nothing; a core that failed stays as it is."""
        while self._failure is None and self.has_work:
            self.step()

    def recompute(self) -> None:
        """All running requests go back to the waiting ones, which have no keys and values."""
        if not self._client.reset_prefix_cache(reset_running_requests=True):
            raise EngineError("vLLM did not give up the keys and values of the running requests")


def log_probs_of(output: EngineCoreOutput) -> list[float]:
    """Of the new tokens, asked for or not.  EngineError where one is not finite."""
    if output.new_logprobs is None:
        return []
    values: list[float] = output.new_logprobs.logprobs[:, 0].tolist()
    refuse_nonfinite_log_probs(values)
    return values


def refuse_nonfinite_log_probs(values: Iterable[float]) -> None:
    """Raise EngineError where one is not finite."""
    if not all(map(math.isfinite, values)):
        raise EngineError(
            "vLLM gives log-probs that are not finite, so its tokens mean nothing: the model's weights are damaged, or "
            "rollout.dtype cannot hold what it computes (float16 ends at 65504)"
        )


def finish_reason_of(output: EngineCoreOutput) -> FinishReason | None:
    """None: the request goes on."""
    if output.finish_reason is None:
        return None
    if output.finish_reason not in REASONS:
        raise EngineError(f"vLLM ended a request with {output.finish_reason}")
    return REASONS[output.finish_reason]
