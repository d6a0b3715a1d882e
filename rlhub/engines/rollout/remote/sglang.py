"""SGLang's launch_server, by its native interface (docs.sglang.ai, "Sampling parameters" and "SGLang for RL").

A pause ends running requests with their tokens, as with vLLM.  Its log-probs are after temperature, before top-k and top-p.
"""

from __future__ import annotations

from typing import Any

from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.remote.dialect import Call, NoTokenIdsError, later_seed, reason


class Server:
    trains = True
    keeps_requests = False
    processed = False
    health = "/health"

    def __init__(self, setup: RolloutSetup) -> None:
        """Nothing of the setup matters here."""

    def generate(self, request: GenerationRequest, params: SamplingParams, model: str) -> Call:
        sampling = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_new_tokens": params.max_new_tokens - request.start,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "sampling_seed": later_seed(request),
            "skip_special_tokens": False,
        }
        return Call("/generate", {"input_ids": list(request.prompt_ids), "sampling_params": sampling, "return_logprob": True})

    def completion(self, answer: Any, version: int) -> Completion:
        told = answer["meta_info"].get("output_token_logprobs")
        if told is None:
            raise NoTokenIdsError
        return Completion(
            token_ids=[int(token) for _, token, *_ in told],
            log_probs=[float(value) for value, *_ in told],
            finish_reason=reason((answer["meta_info"].get("finish_reason") or {}).get("type")),
            versions=[version] * len(told),
        )

    def part(self, event: Any, version: int, have: int) -> Progress | None:
        """Events say all that there is so far, or what is new (--incremental-streaming-output)."""
        found = self.completion(event, version)
        told = event["meta_info"]
        new = slice(have if told.get("completion_tokens", 0) == len(found.token_ids) else 0, None)
        return Progress(
            token_ids=found.token_ids[new],
            log_probs=found.log_probs[new],
            versions=found.versions[new],
            finish_reason=found.finish_reason if told.get("finish_reason") is not None else None,
        )

    def pause(self) -> list[Call]:
        return [Call("/pause_generation", {"mode": "abort"})]

    def resume(self, *, recompute: bool) -> list[Call]:
        return [Call("/continue_generation", {})]

    def reload(self, folder: str, version: int, *, reset_version: bool) -> list[Call]:
        return [Call("/update_weights_from_disk", {"model_path": folder, "weight_version": str(version), "flush_cache": True})]
