"""Request bodies of the endpoint, from JSON to dataclasses.  Every problem is an ApiError that names the field.

A field that does not change the answer is ignored.  A field that would change it and that no engine here supports is refused, and
so is an unknown field, as by OpenAI's own service: it may be misspelled.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rlhub.agents.openai_server.errors import ApiError, bad_field, unsupported
from rlhub.agents.openai_server.shaping import SHAPING, read_shaping, shaping_fields
from rlhub.agents.openai_server.tool_choice import ToolUse, read_tools
from rlhub.engines.rollout.base import MAX_TOP_LOG_PROBS, SamplingParams

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_CHOICES = 128  # OpenAI's own bound on n
MAX_STOPS = 16
MAX_INTEGER = (1 << 63) - 1
Message = dict[str, Any]
SHARED = (
    *("model", "user", "max_tokens", "n", "seed", "stop", "stream", "stream_options", "logprobs"),
    *("temperature", "top_p", "top_k", "ignore_eos", "stop_token_ids", "return_token_ids"),
    *SHAPING,
)
CHAT = frozenset((*SHARED, "messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs"))
COMPLETION = frozenset((*SHARED, "prompt", "start", "echo"))
"""The fields that the server reads from a request to each of the two interfaces."""
IGNORED = (
    *("metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
"""Fields that do not change the answer: where and how fast it is computed, and what OpenAI stores of it."""
_TEXT = "the model reads and writes text only"
_THINKING = "how much a model thinks is up to its chat template: see chat_template_kwargs in the server's settings"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "functions": (([],), "use tools, which have replaced it"),
    "function_call": (("auto", "none"), "use tool_choice, which has replaced it"),
    "audio": ((), _TEXT),
    "modalities": ((["text"],), _TEXT),
    "reasoning_effort": ((), _THINKING),
    "chat_template_kwargs": (({},), _THINKING),
    "verbosity": (("medium",), "there is no such setting here: ask for it in a message"),
    "web_search_options": ((), "the model cannot search by itself: give it a tool"),
    "moderation": ((), "nothing is moderated here"),
    "suffix": (("",), "there is no model here that fills in"),
    "best_of": ((1,), "use n, and choose yourself"),
}
"""Field that no engine here supports -> the values with which it requests nothing, and what to do instead."""


@dataclass(slots=True, kw_only=True)
class RequestBody:
    """The fields that both interfaces share.

    sampling: the server's defaults with the request's settings.  max_tokens: None if the request does not limit them.  seed: None
    for the session's or a random one.  stop: texts that end the answer and are not part of it.  token_ids: the response contains
    token ids and versions too (`return_token_ids`, as in vLLM).  top_log_probs: the number of likeliest tokens whose
    log-probs come with each token's own.  differing: sampling settings in which the request differs from
    the server.  model: the name that the request gives, which nothing checks.  shaping: the fields of `SHAPING` with which
    the request asks for something.  prompt_field, names: the field that has the prompt, and what
    another interface calls the fields, for errors.
    """

    sampling: SamplingParams
    model: str | None = None
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage_chunk: bool = False
    log_probs: bool = False
    top_log_probs: int = 0
    token_ids: bool = False
    differing: tuple[str, ...] = ()
    shaping: dict[str, Any] = field(default_factory=dict)
    prompt_field: str = "prompt"
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ChatBody(RequestBody):
    """A request to /v1/chat/completions, or one of another interface as such.  messages: checked, with their contents as
    text."""

    prompt_field: str = "messages"
    messages: list[Message] = field(default_factory=list)
    tool_use: ToolUse = field(default_factory=ToolUse)


@dataclass(slots=True, kw_only=True)
class CompletionBody(RequestBody):
    """A request to /v1/completions.  prompts: each one text or token ids.  start: as in GenerationRequest, an extension for
    engines of other jobs.  echo: answers begin with their prompt.  scores: only the prompt is wanted, with its log-probs."""

    prompts: list[str | list[int]] = field(default_factory=list)
    start: int = 0
    echo: bool = False
    scores: bool = False


def read_chat(body: Any, defaults: SamplingParams) -> ChatBody:
    """Parses a request to /v1/chat/completions."""
    body = _checked(body, CHAT)
    log_probs, most = read_flag(body, "logprobs"), _integer(body, "top_logprobs", 0, low=0, high=MAX_TOP_LOG_PROBS)
    if most and not log_probs:
        raise ApiError(f"top_logprobs: got {most} without logprobs: send logprobs=true too", param="top_logprobs")
    return ChatBody(
        **_shared(body, defaults),
        log_probs=log_probs,
        top_log_probs=most,
        messages=_messages(body.get("messages")),
        tool_use=read_tools(body),
    )


def read_completion(body: Any, defaults: SamplingParams) -> CompletionBody:
    """Parses a request to /v1/completions."""
    body = _checked(body, COMPLETION)
    echo = read_flag(body, "echo")
    scores = echo and body.get("max_tokens") == 0
    if scores and read_flag(body, "stream"):
        raise ApiError(
            "stream: a prompt without an answer (echo with max_tokens=0) comes whole: leave stream out", param="stream"
        )
    return CompletionBody(
        **_shared({**body, "max_tokens": 1} if scores else body, defaults),
        log_probs=body.get("logprobs") is not None,
        top_log_probs=_integer(body, "logprobs", 0, low=0, high=MAX_TOP_LOG_PROBS),
        names={"top_logprobs": "logprobs"},
        prompts=_prompts(body.get("prompt")),
        echo=echo,
        scores=scores,
        start=_integer(body, "start", 0, low=0, high=MAX_INTEGER),
    )


def refuse(
    body: Mapping[str, Any],
    followed: frozenset[str],
    ignored: Collection[str] = IGNORED,
    refused: Mapping[str, tuple[tuple[Any, ...], str]] = REFUSED,
) -> None:
    """Raises ApiError for the first field that is not supported; null requests nothing.  followed: the fields that are read."""
    for name, value in body.items():
        if value is None or name in followed or name in ignored:
            continue
        neutral, instead = refused.get(name, ((), ""))
        if name not in refused:
            near = difflib.get_close_matches(name, followed, n=1)
            meant = f"did you mean {near[0]}?" if near else "leave it out"
            raise ApiError(f"{name}: no such field here; {meant}", param=name, code="unknown_parameter")
        if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral):
            send = "".join(f" or send {json.dumps(item)}" for item in neutral)
            raise unsupported(name, f"got {json.dumps(value):.100}, but {instead}. Leave {name} out{send}")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Returns a context whose ApiErrors name the fields of another interface.  names: the chat's field -> the interface's."""
    try:
        yield
    except ApiError as error:
        if (name := names.get(error.param or "")) is None:
            raise
        told = str(error).replace(f"{error.param}:", f"{name}:", 1)
        raise ApiError(
            told, status=error.status, kind=error.kind, param=name, code=error.code, retry_after_s=error.retry_after_s
        ) from error


def _checked(body: Any, followed: frozenset[str]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ApiError(f"the body must be a JSON object, got {type(body).__name__}")
    n = body.get("n")
    refuse({**body, "best_of": None} if n is not None and body.get("best_of") == n else body, followed)
    return body


def _shared(body: dict[str, Any], defaults: SamplingParams) -> dict[str, Any]:
    sampling, differing = _sampling(body, defaults)
    stream = read_flag(body, "stream")
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    options = body.get("stream_options")
    options = {} if options is None else options
    if not isinstance(options, dict):
        raise bad_field("stream_options", options, "an object")
    return {
        "sampling": sampling,
        "model": model if isinstance(model := body.get("model"), str) else None,
        "differing": differing,
        "max_tokens": _integer(body, limit, None, low=1, high=MAX_INTEGER),
        "n": _integer(body, "n", 1, low=1, high=MAX_CHOICES),
        "seed": _integer(body, "seed", None, low=-MAX_INTEGER - 1, high=MAX_INTEGER),
        "stop": _stops(body.get("stop")),
        "stream": stream,
        "usage_chunk": read_flag(options, "include_usage", within="stream_options."),
        "token_ids": read_flag(body, "return_token_ids"),
        "shaping": shaping_fields(body),
    }


def _sampling(body: dict[str, Any], defaults: SamplingParams) -> tuple[SamplingParams, tuple[str, ...]]:
    wanted: dict[str, Any] = {
        "temperature": _number(body, "temperature", defaults.temperature, 0.0, 100.0),
        "top_p": _number(body, "top_p", defaults.top_p, 0.0, 1.0),
        "top_k": _integer(body, "top_k", defaults.top_k, low=-1, high=MAX_INTEGER),
        "ignore_eos": read_flag(body, "ignore_eos", default=defaults.ignore_eos),
    }
    if wanted["top_p"] == 0:
        raise bad_field("top_p", body["top_p"], "a number above 0 and at most 1")
    wanted["top_k"] = wanted["top_k"] or -1
    extra = body.get("stop_token_ids") or []
    if not isinstance(extra, list) or not all(_is_integer(item) for item in extra):
        raise bad_field("stop_token_ids", extra, "a list of token ids")
    given = {"temperature": defaults.temperature, "top_p": defaults.top_p, "top_k": defaults.top_k}
    differing = tuple(name for name, value in given.items() if wanted[name] != value)
    stops = tuple(dict.fromkeys((*defaults.stop_token_ids, *extra)))
    return replace(defaults, **wanted, stop_token_ids=stops, shaping=read_shaping(body)), differing


def _number(body: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise bad_field(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def _integer(body: dict[str, Any], name: str, default: Any, *, low: int, high: int | None = None) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not _is_integer(value) or value < low or (high is not None and value > high):
        raise bad_field(name, value, f"an integer of at least {low}" + (f" and at most {high}" if high is not None else ""))
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_flag(body: dict[str, Any], name: str, *, default: bool = False, within: str = "") -> bool:
    """Returns a boolean field.  Raises ApiError for a value that is neither true nor false."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise bad_field(within + name, value, "true or false")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else (value or [])
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(item, str) and item for item in stops):
        raise bad_field("stop", value, f"a text, or a list of at most {MAX_STOPS} texts, none of them empty")
    return tuple(stops)


def _prompts(value: Any) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(_is_integer(item) for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(isinstance(item, list) and item and all(_is_integer(token) for token in item) for item in value):
            return list(value)
    raise bad_field("prompt", value, "a text, a list of token ids, or a list of either")


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise bad_field("messages", value, "a list of at least one message")
    return [_message(f"messages[{index}]", item) for index, item in enumerate(value)]


def _message(place: str, item: Any) -> Message:
    if not isinstance(item, dict) or item.get("role") not in ROLES:
        raise bad_field(f"{place}.role", item.get("role") if isinstance(item, dict) else item, f"one of {', '.join(ROLES)}")
    message: Message = {"role": item["role"], "content": _content(f"{place}.content", item)}
    if item.get("tool_calls"):
        message["tool_calls"] = _calls(f"{place}.tool_calls", item["tool_calls"])
    for name in ("name", "tool_call_id", "reasoning_content"):
        if item.get(name) is not None:
            message[name] = str(item[name])
    return message


def _content(place: str, item: dict[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content
    if content is None and item["role"] == "assistant":
        return ""
    if not isinstance(content, list):
        raise bad_field(place, content, "a text or a list of text parts")
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise bad_field(f"{place}[{index}]", part, "{'type': 'text', 'text': ...}: the model reads text only")
    return "".join(part["text"] for part in content)


def _calls(place: str, value: Any) -> list[dict[str, Any]]:
    calls = []
    for index, call in enumerate(value if isinstance(value, list) else [value]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_field(f"{place}[{index}]", call, "{'id': ..., 'type': 'function', 'function': {...}}")
        calls.append(
            {
                "id": str(call.get("id") or ""),
                "type": "function",
                "function": {"name": function["name"], "arguments": read_arguments(function.get("arguments"))},
            }
        )
    return calls


def read_arguments(value: Any) -> Any:
    """Returns a call's arguments as an object, which chat templates write as JSON; text that is no JSON stays text."""
    if not isinstance(value, str):
        return value if value is not None else {}
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
