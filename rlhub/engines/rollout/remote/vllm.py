"""vLLM's api_server, started with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs.

A pause ends running requests with their tokens; they are sent again with these in the prompt, so each token's version is known
and keys and values are those of the new weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.remote.dialect import Call, later_seed, openai_body, openai_completion, openai_part


class Server:
    trains = True
    keeps_requests = False
    processed = True
    health = "/health"

    def __init__(self, setup: RolloutSetup) -> None:
        """Nothing of the setup matters here."""

    def generate(self, request: GenerationRequest, params: SamplingParams, model: str) -> Call:
        rest = replace(params, max_new_tokens=params.max_new_tokens - request.start)
        body = openai_body(replace(request, seed=later_seed(request)), rest, model)
        return Call("/v1/completions", {**body, "add_special_tokens": False, "skip_special_tokens": False})

    def completion(self, answer: Any, version: int) -> Completion:
        return openai_completion(answer, version)

    def part(self, event: Any, version: int, have: int) -> Progress | None:
        return openai_part(event, version)

    def pause(self) -> list[Call]:
        return [Call("/pause?mode=abort&clear_cache=true", {})]

    def resume(self, *, recompute: bool) -> list[Call]:
        return [Call("/resume", {})]

    def reload(self, folder: str, version: int, *, reset_version: bool) -> list[Call]:
        return [
            Call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
            Call("/reset_prefix_cache", {}),
        ]
