"""Calls of tools and their results, the terms that tools, environments and workflows share.

A schema describes a tool to models, in the form that chat templates and OpenAI-compatible servers take: `{"type": "function",
"function": {"name": ..., "description": ..., "parameters": JSON schema}}`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ToolSchema = dict[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolCall:
    """One call as the model wrote it; name and arguments are not checked yet."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolResult:
    """The result of a call.

    text: what the model reads.  failed: the call failed, and `text` says why.  reward: credited to the turn with the call; if the
    run's reward function scores the episode, it is added to that.  done: the episode ends with this call of an environment's
    tool.  metrics: the call's own numbers.
    """

    text: str
    failed: bool = False
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


def as_result(value: Any) -> ToolResult:
    """Returns the ToolResult of a value that a tool's code returned.

    A ToolResult stays as it is and text becomes its text.  A tuple (text, reward, metrics) gives its parts (None: no reward or
    metrics; metrics that are no numbers are left out).  Any other value becomes JSON, or text if JSON cannot represent it.
    """
    if isinstance(value, ToolResult):
        return value
    if isinstance(value, str):
        return ToolResult(text=value)
    if isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], str) and _scores(*value[1:]):
        text, reward, metrics = value
        return ToolResult(text=text, reward=_number("reward", reward or 0.0), metrics=_numbers(metrics or {}))
    try:
        return ToolResult(text=json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return ToolResult(text=str(value))


def _scores(reward: Any, metrics: Any) -> bool:
    return isinstance(reward, int | float | None) and isinstance(metrics, Mapping | None)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): _number(f"metric {name!r}", value) for name, value in metrics.items() if isinstance(value, int | float)}


def _number(what: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"the tool returned the {what} {value}; expected a finite number")
    return float(value)


def schema_name(schema: ToolSchema) -> str:
    """Returns the tool's name in its schema."""
    return str(schema["function"]["name"])
