"""From names and settings to tools.

tools:
  - calculator                          # a registered name
  - name: python
    settings: {timeout_s: 5}
  - name: my_package.lookup:search      # or path/to/file.py:search: a typed function, or a Tool class
    settings: {index: /data/index}      # keywords that the model does not see
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhub.errors import ConfigError, RlhubError
from rlhub.tools.base import Tool, ToolSource
from rlhub.tools.functions import FunctionTool
from rlhub.tools.registry import TOOLS
from rlhub.utils.user_code import load_target


def read_tool_file(path: str | Path) -> list[Any]:
    """The entries of a YAML file.  ConfigError if it has none."""
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"tool_config_path={path}: {error}") from error
    entries = content.get("tools") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"tool_config_path={path}: expected a list under 'tools', got {entries!r:.80}")
    return entries


def load_tools(entries: Sequence[Any], *, where: str) -> list[Tool | ToolSource]:
    """The tools of these entries.  ConfigError lists every one that cannot be made; `where`: the setting they stand in."""
    tools, problems = [], []
    for number, entry in enumerate(entries):
        try:
            tools.append(_load(entry))
        except (RlhubError, TypeError, ValueError) as error:
            problems.append(f"{where}, entry {number} ({entry!r:.80}): {error}")
    if problems:
        raise ConfigError(problems)
    return tools


def _load(entry: Any) -> Tool | ToolSource:
    if isinstance(entry, str):
        entry = {"name": entry}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str) or entry.keys() - {"name", "settings"}:
        raise ValueError("expected a name, or a mapping with 'name' and 'settings'")
    name, settings = entry["name"], dict(entry.get("settings") or {})
    target = load_target(name) if ":" in name else TOOLS.get(name)
    if not callable(target):
        raise ValueError(f"{name} is a {type(target).__name__}; expected a typed function or a Tool class")
    if isinstance(target, type) and issubclass(target, Tool | ToolSource):
        return target(**settings)
    return FunctionTool(target, bound=settings)
