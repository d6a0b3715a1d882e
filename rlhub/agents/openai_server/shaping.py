"""The request fields that change the distribution beyond temperature, top_p and top_k: penalties, biases and structured output.

They are passed on to the engine, which may not have them.  Answers that train are refused them, because a trainer computes the
log-probs of the plain policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlhub.agents.openai_server.errors import ApiError, bad_field, unsupported
from rlhub.engines.rollout.base import Shaping

SHAPING: Mapping[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "min_tokens": 0,
    "logit_bias": {},
    "response_format": {"type": "text"},
}
"""Field -> the value with which it requests nothing."""
RANGES: Mapping[str, tuple[float, float]] = {
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "min_p": (0.0, 1.0),
}
"""Field -> its smallest and largest value; those of the penalties are OpenAI's."""
MAX_BIAS = 100.0  # OpenAI's own bound
TRAINS = (
    "the answers of this session train, and a trainer computes log-probs of the plain policy; requests outside of sessions, and "
    "those of frozen roles, may have it"
)


def read_shaping(body: Mapping[str, Any]) -> Shaping | None:
    """Returns the settings of a request, or None if it has none.  Raises ApiError for an invalid one."""
    asked = shaping_fields(body)
    if not asked:
        return None
    found: dict[str, Any] = {name: _number(name, asked[name], *RANGES[name]) for name in RANGES.keys() & asked.keys()}
    if "min_tokens" in asked:
        found["min_tokens"] = int(_number("min_tokens", asked["min_tokens"], 1, 1 << 31, whole=True))
    if "logit_bias" in asked:
        found["logit_bias"] = _biases(asked["logit_bias"])
    if "response_format" in asked:
        found["schema"] = _schema(asked["response_format"])
    return Shaping(**found)


def refuse_shaping(body: Mapping[str, Any]) -> ApiError:
    """Returns the error for a request whose answer trains.  body: the fields of the request that `read_shaping` has read."""
    name, value = next(iter(body.items()))
    return unsupported(name, f"got {json.dumps(value):.100}, but {TRAINS}. Leave {name} out or send {json.dumps(SHAPING[name])}")


def shaping_fields(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields with which a request asks for something."""
    return {name: body[name] for name, neutral in SHAPING.items() if body.get(name) is not None and body[name] != neutral}


def _number(name: str, value: Any, low: float, high: float, *, whole: bool = False) -> float:
    kinds = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise bad_field(name, value, f"{'an integer' if whole else 'a number'} from {low:g} to {high:g}")
    return value


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    expected = f"an object of token ids and numbers from -{MAX_BIAS:g} to {MAX_BIAS:g}"
    if not isinstance(value, dict) or not all(str(token).isdecimal() for token in value):
        raise bad_field("logit_bias", value, expected)
    return tuple((int(token), float(_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS))) for token, bias in value.items())


def _schema(form: Any) -> str:
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        return json.dumps({"type": "object"})
    named = form.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, dict) else None
    if not isinstance(schema, dict):
        expected = "{'type': 'text' | 'json_object'} or {'type': 'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}"
        raise bad_field("response_format", form, expected)
    return json.dumps(schema)
