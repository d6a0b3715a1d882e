"""What a model asks of a tool and what comes back: tools, environments and workflows speak of calls in these terms.

A tool is described to models by a schema in the form that chat templates and OpenAI-compatible servers take:
`{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`.
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
    """One call as the model wrote it; nobody has checked name or arguments yet."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(slots=True, kw_only=True, frozen=True)
class ToolResult:
    """text: what the model reads.  failed: the call brought an error, which `text` says.

    reward: credited to the turn that made the call; where the run's reward function scores the episode, on top of that.
    done: an environment's: the episode ends with it.  metrics: the call's own numbers.
    """

    text: str
    failed: bool = False
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)


def as_result(value: Any) -> ToolResult:
    """What a tool's code returns: a ToolResult and text as they are, a tuple (text, reward, metrics) as its parts (None: none; of
    the metrics those that are numbers), anything else as JSON where it has a JSON form."""
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
    """The tool's name in its schema."""
    return str(schema["function"]["name"])
