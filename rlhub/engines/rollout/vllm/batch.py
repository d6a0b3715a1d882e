"""Whole batches through the engine core: what LLM.generate gives, without its objects.  Imports vLLM: see `environment`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm.v1.engine import EngineCoreOutput

from rlhub.engines.rollout.base import Completion, FinishReason, GenerationRequest, SamplingParams
from rlhub.engines.rollout.vllm.core import Core, finish_reason_of, log_probs_of
from rlhub.errors import EngineError


@dataclass(slots=True)
class _Row:
    """What one request has so far."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def extend(self, output: EngineCoreOutput) -> None:
        self.token_ids.extend(output.new_token_ids)
        self.log_probs.extend(log_probs_of(output))
        self.finish_reason = finish_reason_of(output)

    def completion(self, *, log_probs: bool, version: int) -> Completion:
        tokens = len(self.token_ids)
        if len(self.log_probs) != tokens or self.finish_reason is None:
            raise EngineError(
                f"vLLM returned {tokens} tokens with {len(self.log_probs)} log-probabilities and ended with {self.finish_reason}"
            )
        return Completion(
            token_ids=self.token_ids,
            log_probs=self.log_probs if log_probs else [],
            finish_reason=self.finish_reason,
            versions=[version] * tokens,
        )


def generate_batch(core: Core, requests: Sequence[GenerationRequest], params: SamplingParams, version: int) -> list[Completion]:
    """Completions in the order of the requests, by a core that has no others.  On return nothing is left of them in it, no
    step that runs ahead either; after an error neither, unless a step failed: then it takes no more requests."""
    rows = {f"row {index}": _Row() for index in range(len(requests))}
    try:
        for name, request in zip(rows, requests, strict=True):
            core.add(name, request, params)
        while core.has_work:
            for output in core.step():
                rows[output.request_id].extend(output)
    except BaseException:
        core.abort(rows)
        core.drain()
        raise
    return [row.completion(log_probs=params.log_probs, version=version) for row in rows.values()]
