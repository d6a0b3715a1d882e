"""Which fields of a request are followed here, which change nothing, and why others are refused.

A field that changes nothing about the answer is passed over.  One that would, and that nothing here can follow, is refused
rather than passed over, and so is one that nobody knows, as OpenAI's own service does: it may be a misspelled other.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from rlhub.agents.openai_server.errors import ApiError, unsupported

SHARED = (
    *("model", "user", "max_tokens", "n", "seed", "stop", "stream", "stream_options", "logprobs"),
    *("temperature", "top_p", "top_k", "ignore_eos", "stop_token_ids", "return_token_ids"),
)
CHAT = frozenset((*SHARED, "messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs"))
COMPLETION = frozenset((*SHARED, "prompt", "start"))
"""Fields that are read."""
IGNORED = (
    *("metadata", "store", "service_tier", "safety_identifier", "prediction"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
)
"""Where and how fast an answer is made, and what OpenAI keeps of it."""

_SAMPLING = "the engines here sample by temperature, top_p and top_k alone"
_FREE = "answers are sampled freely and not held to a grammar: ask for the form in a message, and check it"
_TEXT = "the model reads and writes text only"
_THINKING = "how much a model thinks is up to its chat template: see chat_template_kwargs in the server's settings"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "presence_penalty": ((0,), _SAMPLING),
    "frequency_penalty": ((0,), _SAMPLING),
    "repetition_penalty": ((1,), _SAMPLING),
    "min_p": ((0,), _SAMPLING),
    "logit_bias": (({},), _SAMPLING),
    "response_format": (({"type": "text"},), _FREE),
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
    "echo": ((False,), "an answer does not begin with its prompt: put the two together yourself"),
    "best_of": ((1,), "use n, and choose yourself"),
}
"""Fields that nothing here follows -> the values with which they ask for nothing, and what to do instead."""


def refuse(body: Mapping[str, Any], followed: frozenset[str]) -> None:
    """ApiError for the first field that cannot be followed; null asks for nothing.  followed: CHAT or COMPLETION."""
    for name, value in body.items():
        if value is None or name in followed or name in IGNORED:
            continue
        neutral, instead = REFUSED.get(name, ((), ""))
        if name not in REFUSED:
            near = difflib.get_close_matches(name, followed, n=1)
            meant = f"did you mean {near[0]}?" if near else "leave it out"
            raise ApiError(f"{name}: no such field here; {meant}", param=name, code="unknown_parameter")
        if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral):
            send = "".join(f" or send {json.dumps(item)}" for item in neutral)
            raise unsupported(name, f"got {json.dumps(value):.100}, but {instead}. Leave {name} out{send}")
