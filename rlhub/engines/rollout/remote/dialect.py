"""Dialect: how one kind of server is asked, and read."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from rlhub.engines.rollout.base import Completion, FinishReason, GenerationRequest, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.errors import EngineError
from rlhub.utils.seeding import sample_seed

NO_IDS = (
    "the server returns no token ids or no log-probs: it can serve evaluation only. For training it must return both: rlhub's "
    "main_serve, vLLM's api_server (return_token_ids) and SGLang's /generate do"
)


class Call(NamedTuple):
    """One HTTP request."""

    path: str
    body: dict[str, Any]


class Dialect(Protocol):
    """One object an engine.

    keeps_requests: a pause leaves requests on the server as they are; False: it ends them with the tokens so far, and they are
    sent again.  trains: it gives token ids and log-probs.  processed: log-probs are those of the truncated distribution, so
    that of the only token under top_k=1 is 0.  health: a path that answers when the server is ready.
    """

    keeps_requests: bool
    trains: bool
    processed: bool
    health: str

    def __init__(self, setup: RolloutSetup) -> None: ...

    def generate(self, request: GenerationRequest, params: SamplingParams, model: str) -> Call:
        """Ask for a completion.  `request.start` tokens of it are in the prompt already."""
        ...

    def completion(self, answer: Any, version: int) -> Completion:
        """Read it.  version: of tokens where the server does not say.  EngineError without token ids or log-probs."""
        ...

    def pause(self) -> list[Call]: ...

    def resume(self, *, recompute: bool) -> list[Call]: ...

    def reload(self, folder: str, version: int) -> list[Call]:
        """Take the Hugging Face weights in `folder`, while paused."""
        ...


def openai_body(request: GenerationRequest, params: SamplingParams, model: str) -> dict[str, Any]:
    """Of /v1/completions, as rlhub and vLLM both understand it."""
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "seed": request.seed,
        "logprobs": 0,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": params.ignore_eos,
        "return_token_ids": True,
    }


def openai_completion(answer: Any, version: int) -> Completion:
    """Of its answer."""
    choice = answer["choices"][0]
    ids, told = choice.get("token_ids"), choice.get("logprobs") or {}
    log_probs = told.get("token_logprobs")
    if ids is None or log_probs is None or len(ids) != len(log_probs):
        raise EngineError(NO_IDS)
    return Completion(
        token_ids=[int(token) for token in ids],
        log_probs=[float(value) for value in log_probs],
        finish_reason=reason(choice.get("finish_reason")),
        versions=list(choice.get("token_versions") or [version] * len(ids)),
    )


def reason(told: Any) -> FinishReason:
    match told:
        case "length" | "abort":
            return told  # type: ignore[no-any-return]
        case _:
            return "stop"


def later_seed(request: GenerationRequest) -> int:
    """For servers whose noise starts anew with each request: not that of the tokens that are there already."""
    return sample_seed(request.seed, request.start, 0) if request.start else request.seed
