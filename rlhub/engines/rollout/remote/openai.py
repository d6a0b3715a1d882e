"""Any other OpenAI-compatible server: it answers with text, so it serves evaluation only.

The text is tokenized here, which need not give the tokens that were sampled: nothing of it may be trained on.
"""

from __future__ import annotations

from typing import Any

from rlhub.engines.rollout.base import Completion, GenerationRequest, Progress, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.engines.rollout.remote.dialect import NO_IDS, Call, NoTokenIdsError, reason
from rlhub.errors import EngineError
from rlhub.models.tokenizer import load_tokenizer


class Server:
    trains = False
    keeps_requests = False
    processed = False
    health = "/v1/models"

    def __init__(self, setup: RolloutSetup) -> None:
        self._tokenizer = load_tokenizer(setup.model.path, trust_remote_code=setup.model.trust_remote_code)

    def generate(self, request: GenerationRequest, params: SamplingParams, model: str) -> Call:
        if params.log_probs:
            raise EngineError(NO_IDS)
        return Call(
            "/v1/completions",
            {
                "model": model,
                "prompt": list(request.prompt_ids),
                "max_tokens": params.max_new_tokens - request.start,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "seed": request.seed,
            },
        )

    def completion(self, answer: Any, version: int) -> Completion:
        choice = answer["choices"][0]
        ids = list(self._tokenizer([choice["text"]], add_special_tokens=False)["input_ids"][0])
        ended = reason(choice.get("finish_reason"))
        if ended == "stop":
            ids.append(int(self._tokenizer.eos_token_id))
        return Completion(token_ids=ids, log_probs=[], finish_reason=ended, versions=[version] * len(ids))

    def part(self, event: Any, version: int, have: int) -> Progress | None:
        raise NoTokenIdsError  # text that is tokenized piece by piece gives other tokens than all of it

    def pause(self) -> list[Call]:
        return []

    def resume(self, *, recompute: bool) -> list[Call]:
        return []

    def reload(self, folder: str, version: int, *, reset_version: bool) -> list[Call]:
        raise EngineError(NO_IDS)
