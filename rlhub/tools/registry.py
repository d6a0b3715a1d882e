"""The registries of the tools and call formats that come with rlhub.  Importing this module loads none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlhub.config.names import unknown
from rlhub.registry import Registry

if TYPE_CHECKING:
    from rlhub.tools.base import Tool, ToolSource
    from rlhub.tools.call_streams import ReplyParser
    from rlhub.tools.formats import ParsedReply

TOOLS: Registry[Callable[..., Tool | ToolSource]] = Registry("tool")
"""Name -> the class or function that builds the tool from its settings, passed as keyword arguments."""
TOOLS.add_lazy("calculator", "rlhub.tools.calculator:CalculatorTool")
TOOLS.add_lazy("python", "rlhub.tools.python:PythonTool")
TOOLS.add_lazy("mcp", "rlhub.tools.mcp:McpServer")

TOOL_FORMATS: Registry[Callable[[str], ParsedReply]] = Registry("tool format")
"""Name -> `parse(text)`, which parses the calls in a model's reply."""
TOOL_FORMATS.add_lazy("hermes", "rlhub.tools.formats:parse_hermes")
TOOL_FORMATS.add_lazy("json", "rlhub.tools.formats:parse_json")

REPLY_PARSERS: Registry[Callable[..., ReplyParser]] = Registry("parser library")
"""Name -> `build(tool_format, reasoning_parser, tokenizer, template_kwargs)`, which builds a library's parser of replies by the
names of that library, "" for none."""
REPLY_PARSERS.add_lazy("vllm", "rlhub.engines.rollout.vllm.parsers:VllmReplies")
REASONING_LIBRARY = "vllm"
"""The library of `reasoning_parser`; tool formats name theirs: `vllm:qwen3_coder`."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ReplyFormat:
    """How replies are read.  find_calls: in one of rlhub's formats; parser: by a library, then of calls, reasoning or both."""

    find_calls: Callable[[str], ParsedReply] | None = None
    parser: ReplyParser | None = None


def library_format(tool_format: str) -> tuple[str, str]:
    """Returns the library of a tool format, "" for rlhub's own, and the format's name there."""
    library, _, name = tool_format.rpartition(":")
    return library, name


def reply_problems(key: str, tool_format: str, reasoning_parser: str | None) -> list[str]:
    """Returns the problems of these settings that show without the library.  key: of the tool format."""
    library, _ = library_format(tool_format)
    found = unknown(key, REPLY_PARSERS, library) if library else unknown(key, TOOL_FORMATS, tool_format)
    needed = library or (REASONING_LIBRARY if reasoning_parser else "")
    if not found and needed and find_spec(needed) is None:
        found.append(
            f"{key}={tool_format}, reasoning_parser={reasoning_parser}: {needed} is not installed, which has the parsers"
        )
    return found


def reply_format(
    tool_format: str, reasoning_parser: str | None, tokenizer: Any, template_kwargs: Mapping[str, Any] | None = None
) -> ReplyFormat:
    """Returns how replies are read.  Raises ConfigError for a name that the library does not have or that the tokenizer does not
    fit."""
    library, name = library_format(tool_format)
    own = TOOL_FORMATS.get(name) if not library else None
    if own is not None and not reasoning_parser:
        return ReplyFormat(find_calls=own)
    build = REPLY_PARSERS.get(library or REASONING_LIBRARY)
    return ReplyFormat(find_calls=own, parser=build("" if own else name, reasoning_parser or "", tokenizer, template_kwargs))
