"""Checks every engine makes on requests before it generates."""

from __future__ import annotations

from collections.abc import Sequence

from rlhub.engines.rollout.base import GenerationRequest, SamplingParams
from rlhub.errors import EngineError


def check_requests(requests: Sequence[GenerationRequest], params: SamplingParams, *, max_model_len: int) -> None:
    """Raises EngineError for an empty prompt, a prompt without room for one token, or impossible sampling parameters."""
    if params.max_new_tokens < 1:
        raise EngineError(f"max_new_tokens is {params.max_new_tokens}; at least 1 token must be asked for")
    if params.temperature < 0 or not 0 < params.top_p <= 1 or params.top_k == 0 or params.top_k < -1:
        raise EngineError(
            f"sampling parameters out of range: temperature {params.temperature} (>= 0), top_p {params.top_p} "
            f"(0 < top_p <= 1), top_k {params.top_k} (-1 is off, else >= 1)"
        )
    for index, request in enumerate(requests):
        length = len(request.prompt_ids)
        if length == 0:
            raise EngineError(f"request {index} has an empty prompt; a prompt needs at least one token")
        if length >= max_model_len:
            raise EngineError(
                f"request {index} has a prompt of {length} tokens, which leaves no room in max_model_len {max_model_len}; "
                "raise rollout.max_model_len or filter over-long prompts"
            )
        if not 0 <= request.start < min(length + 1, params.max_new_tokens):
            raise EngineError(
                f"request {index} goes on after {request.start} tokens of its completion; that must be at most its "
                f"{length} prompt tokens and less than max_new_tokens {params.max_new_tokens}"
            )
