"""Dialects: the calls that each kind of rollout server understands, and how its answers are read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from rlhub.engines.rollout.base import Completion, FinishReason, GenerationRequest, Progress, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup
from rlhub.errors import EngineError
from rlhub.models.tokenizer import load_tokenizer
from rlhub.utils.seeding import sample_seed

NO_IDS = (
    "the server returns no token ids or no log-probs: it can serve evaluation only. For training it must return both: rlhub's "
    "main_serve, vLLM's api_server (return_token_ids) and SGLang's /generate do"
)


class NoTokenIdsError(EngineError):
    """A server has answered with text, without token ids or log-probs."""

    def __init__(self, message: str = NO_IDS) -> None:
        super().__init__(message)


class Call(NamedTuple):
    """One HTTP request: its path and its JSON body."""

    path: str
    body: dict[str, Any]


class Dialect(Protocol):
    """The calls to one kind of server and the reading of its answers; each engine has its own object.

    keeps_requests: True if requests stay on the server through a pause; False if the pause ends them with the tokens so far, so
        that they must be sent again.
    trains: True if the server returns token ids and log-probs, also in streams (`stream` in the body).
    processed: True if log-probs are those of the truncated distribution, so that the only token under top_k=1 has log-prob 0.
    health: a path that answers once the server is ready.
    """

    keeps_requests: bool
    trains: bool
    processed: bool
    health: str

    def __init__(self, setup: RolloutSetup) -> None: ...

    def generate(self, request: GenerationRequest, params: SamplingParams, model: str) -> Call:
        """Returns the call for a completion.  The last `request.start` tokens of the prompt belong to the completion already."""
        ...

    def completion(self, answer: Any, version: int) -> Completion:
        """Reads the answer to `generate`.  Raises EngineError if it has no token ids or log-probs.

        version: the policy version of tokens for which the server names none.
        """
        ...

    def part(self, event: Any, version: int, have: int) -> Progress | None:
        """Reads one event of a stream; returns None for an event without news, and the finish reason with the last tokens.

        have: the number of this stream's tokens that were read before.  Raises NoTokenIdsError for text without token ids.
        """
        ...

    def pause(self) -> list[Call]:
        """Returns the calls that pause generation."""
        ...

    def resume(self, *, recompute: bool) -> list[Call]:
        """Returns the calls that continue generation.  recompute: the server discards the keys and values of its requests
        first."""
        ...

    def reload(self, folder: str, version: int, *, reset_version: bool) -> list[Call]:
        """Returns the calls that load the Hugging Face weights in `folder`, while the server is paused.

        reset_version: True for the first weights of this job, which counts versions from where it starts or resumes, whatever
        the server had before.
        """
        ...


class _CompletionsDialect:
    """The common part of servers of /v1/completions that return token ids and log-probs."""

    trains = True
    processed = True
    health = "/health"

    def __init__(self, setup: RolloutSetup) -> None:
        """Creates the dialect, which needs no part of the setup."""

    def completion(self, answer: Any, version: int) -> Completion:
        choice = answer["choices"][0]
        ids, log_probs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if ids is None or log_probs is None or len(ids) != len(log_probs):
            raise NoTokenIdsError
        return Completion(
            token_ids=[int(token) for token in ids],
            log_probs=[float(value) for value in log_probs],
            finish_reason=_reason(choice.get("finish_reason")),
            versions=list(choice.get("token_versions") or [version] * len(ids)),
        )

    def part(self, event: Any, version: int, have: int) -> Progress | None:
        """Reads one event of the stream; the last ones may have a finish reason and no tokens."""
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
            finish_reason=_reason(ended) if ended is not None else None,
        )


class RlhubDialect(_CompletionsDialect):
    """The dialect of rlhub's own server (rlhub.trainer.main_serve): requests stay through a pause, and each token comes with
    its version."""

    keeps_requests = True

    def generate(self, request: GenerationRequest, params: SamplingParams, model: str) -> Call:
        return Call("/v1/completions", {**_completions_body(request, params, model), "start": request.start})

    def pause(self) -> list[Call]:
        return [Call("/admin/pause", {})]

    def resume(self, *, recompute: bool) -> list[Call]:
        return [Call("/admin/resume", {"recompute": recompute})]

    def reload(self, folder: str, version: int, *, reset_version: bool) -> list[Call]:
        return [Call("/admin/weights", {"folder": folder, "version": version, "reset_version": reset_version})]


class VLLMDialect(_CompletionsDialect):
    """The dialect of vLLM's api_server, started with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs.

    A pause ends running requests with their tokens, and the engine sends them again with these tokens in the prompt.  So the
    version of each token is known, and keys and values are computed with the new weights.
    """

    keeps_requests = False

    def generate(self, request: GenerationRequest, params: SamplingParams, model: str) -> Call:
        rest = replace(params, max_new_tokens=params.max_new_tokens - request.start)
        body = _completions_body(replace(request, seed=_later_seed(request)), rest, model)
        return Call("/v1/completions", {**body, "add_special_tokens": False, "skip_special_tokens": False})

    def pause(self) -> list[Call]:
        return [Call("/pause?mode=abort&clear_cache=true", {})]

    def resume(self, *, recompute: bool) -> list[Call]:
        return [Call("/resume", {})]

    def reload(self, folder: str, version: int, *, reset_version: bool) -> list[Call]:
        return [
            Call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
            Call("/reset_prefix_cache", {}),
        ]


class SGLangDialect:
    """The dialect of SGLang's launch_server, by its native interface, as the sources of 0.5.23 have it (http_server.py,
    io_struct.py, tokenizer_manager.py).

    A pause ends running requests with their tokens, as with vLLM, and waits until they have.  The log-probs are taken after
    temperature and before top-k and top-p (unless the server has SGLANG_RETURN_ORIGINAL_LOGPROB).  Seeds count only under
    --enable-deterministic-inference; otherwise the server ignores them, as it does every field that it does not know.
    """

    trains = True
    keeps_requests = False
    processed = False
    health = "/model_info"  # its /health samples a token, which fails while the server is paused

    def __init__(self, setup: RolloutSetup) -> None:
        """Creates the dialect, which needs no part of the setup."""

    def generate(self, request: GenerationRequest, params: SamplingParams, model: str) -> Call:
        sampling = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_new_tokens": params.max_new_tokens - request.start,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            "sampling_seed": _later_seed(request),
            "skip_special_tokens": False,
        }
        return Call("/generate", {"input_ids": list(request.prompt_ids), "sampling_params": sampling, "return_logprob": True})

    def completion(self, answer: Any, version: int) -> Completion:
        pairs = answer["meta_info"].get("output_token_logprobs")
        if pairs is None:
            raise NoTokenIdsError
        return Completion(
            token_ids=[int(token) for _, token, *_ in pairs],
            log_probs=[float(value) for value, *_ in pairs],
            finish_reason=_reason((answer["meta_info"].get("finish_reason") or {}).get("type")),
            versions=[version] * len(pairs),
        )

    def part(self, event: Any, version: int, have: int) -> Progress | None:
        """Reads an event, which holds either all tokens so far or only the new ones (--incremental-streaming-output)."""
        found = self.completion(event, version)
        meta = event["meta_info"]
        new = slice(have if meta.get("completion_tokens", 0) == len(found.token_ids) else 0, None)
        return Progress(
            token_ids=found.token_ids[new],
            log_probs=found.log_probs[new],
            versions=found.versions[new],
            finish_reason=found.finish_reason if meta.get("finish_reason") is not None else None,
        )

    def pause(self) -> list[Call]:
        return [Call("/pause_generation", {"mode": "abort"})]

    def resume(self, *, recompute: bool) -> list[Call]:
        return [Call("/continue_generation", {})]

    def reload(self, folder: str, version: int, *, reset_version: bool) -> list[Call]:
        return [Call("/update_weights_from_disk", {"model_path": folder, "weight_version": str(version), "flush_cache": True})]


class OpenAIDialect:
    """The dialect of any other OpenAI-compatible server, which answers with text and so serves evaluation only.

    The text is tokenized here, which need not give the tokens that were sampled, so no completion may be trained on.
    """

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
        ended = _reason(choice.get("finish_reason"))
        if ended == "stop":
            ids.append(int(self._tokenizer.eos_token_id))
        return Completion(token_ids=ids, log_probs=[], finish_reason=ended, versions=[version] * len(ids))

    def part(self, event: Any, version: int, have: int) -> Progress | None:
        raise NoTokenIdsError  # text that is tokenized piece by piece gives other tokens than the whole text

    def pause(self) -> list[Call]:
        return []

    def resume(self, *, recompute: bool) -> list[Call]:
        return []

    def reload(self, folder: str, version: int, *, reset_version: bool) -> list[Call]:
        raise EngineError(NO_IDS)


DIALECTS: dict[str, type[Dialect]] = {
    "rlhub": RlhubDialect,
    "vllm": VLLMDialect,
    "sglang": SGLangDialect,
    "openai": OpenAIDialect,
}
"""Maps each value of `rollout.remote.server` to its dialect."""


def _completions_body(request: GenerationRequest, params: SamplingParams, model: str) -> dict[str, Any]:
    """Returns the body of /v1/completions in the form that rlhub and vLLM both understand."""
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


def _reason(word: Any) -> FinishReason:
    match word:
        case "length" | "abort":
            return word  # type: ignore[no-any-return]
        case _:
            return "stop"


def _later_seed(request: GenerationRequest) -> int:
    """Returns the seed for a server whose noise starts over with each request: a continued completion must not repeat the
    noise of the tokens that it already has."""
    return sample_seed(request.seed, request.start, 0) if request.start else request.seed
