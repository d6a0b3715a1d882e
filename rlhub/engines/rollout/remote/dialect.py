"""Dialect: how one kind of server is asked, and read."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from rlhub.engines.rollout.base import Completion, FinishReason, GenerationRequest, Progress, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.errors import EngineError
from rlhub.utils.seeding import sample_seed

NO_IDS = (
    "the server returns no token ids or no log-probs: it can serve evaluation only. For training it must return both: rlhub's "
    "main_serve, vLLM's api_server (return_token_ids) and SGLang's /generate do"
)


class NoTokenIdsError(EngineError):
    """Text came without token ids or log-probs."""

    def __init__(self, message: str = NO_IDS) -> None:
        super().__init__(message)


class Call(NamedTuple):
    """One HTTP request."""

    path: str
    body: dict[str, Any]


class Dialect(Protocol):
    """One object an engine.

    keeps_requests: a pause leaves requests on the server as they are; False: it ends them with the tokens so far, and they are
    sent again.  trains: it gives token ids and log-probs, also in streams (`stream` in the body).  processed: log-probs are
    those of the truncated distribution, so that of the only token under top_k=1 is 0.  health: a path that answers when the
    server is ready.
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

    def part(self, event: Any, version: int, have: int) -> Progress | None:
        """Read an event of a stream, of whose tokens `have` were read before; the reason with the last ones.  None: it says
        nothing.  NoTokenIdsError where it has none."""
        ...

    def pause(self) -> list[Call]: ...

    def resume(self, *, recompute: bool) -> list[Call]: ...

    def reload(self, folder: str, version: int, *, reset_version: bool) -> list[Call]:
        """Take the Hugging Face weights in `folder`, while paused.  reset_version: the first of this job, which counts its
        versions from where it begins or goes on, whatever the server has."""
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
        raise NoTokenIdsError
    return Completion(
        token_ids=[int(token) for token in ids],
        log_probs=[float(value) for value in log_probs],
        finish_reason=reason(choice.get("finish_reason")),
        versions=list(choice.get("token_versions") or [version] * len(ids)),
    )


def openai_part(event: Any, version: int) -> Progress | None:
    """Of one event of its stream, whose last ones may have a reason and no tokens."""
    choices = event.get("choices")
    if not choices:
        return None
    choice = choices[0]
    ids, log_probs = choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("token_logprobs") or []
    if len(ids) != len(log_probs) or (choice.get("text") and choice.get("token_ids") is None):
        raise NoTokenIdsError
    ended = choice.get("finish_reason")
    return Progress(
        token_ids=[int(token) for token in ids],
        log_probs=[float(value) for value in log_probs],
        versions=list(choice.get("token_versions") or [version] * len(ids)),
        finish_reason=reason(ended) if ended is not None else None,
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
