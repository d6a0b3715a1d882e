"""What a model asks of a tool and what comes back: tools, environments and workflows speak of calls in these terms.

A tool is described to models by a schema in the form that chat templates and OpenAI-compatible servers take:
`{"type": "function", "function": {"name": ..., "description": ..., "parameters": JSON schema}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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

    reward, done: an environment's: credited to the turn that made the call; the episode ends with it.  Plain tools give none.
    """

    text: str
    failed: bool = False
    reward: float = 0.0
    done: bool = False


def schema_name(schema: ToolSchema) -> str:
    """The tool's name in its schema."""
    return str(schema["function"]["name"])
