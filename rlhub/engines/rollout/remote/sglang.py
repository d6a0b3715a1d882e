"""SGLang's launch_server, by its native interface (docs.sglang.ai, "Sampling parameters" and "SGLang for RL").

A pause ends running requests with their tokens, as with vLLM.  Its log-probs are after temperature, before top-k and top-p.
"""

from __future__ import annotations

from typing import Any

from rlhub.engines.rollout.base import Completion, GenerationRequest, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.remote.dialect import NO_IDS, Call, later_seed, reason
from rlhub.errors import EngineError


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
            raise EngineError(NO_IDS)
        return Completion(
            token_ids=[int(token) for _, token, *_ in told],
            log_probs=[float(value) for value, *_ in told],
            finish_reason=reason((answer["meta_info"].get("finish_reason") or {}).get("type")),
            versions=[version] * len(told),
        )

    def pause(self) -> list[Call]:
        return [Call("/pause_generation", {"mode": "abort"})]

    def resume(self, *, recompute: bool) -> list[Call]:
        return [Call("/continue_generation", {})]

    def reload(self, folder: str, version: int) -> list[Call]:
        return [Call("/update_weights_from_disk", {"model_path": folder, "weight_version": str(version), "flush_cache": True})]
