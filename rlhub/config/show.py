"""A configuration as text: the YAML of a run (secrets blanked) and the list of all settings for `--help`."""

from __future__ import annotations

import textwrap
from typing import Any

from rlhub.config.schema import describe, leaves, scalar, to_dict
from rlhub.utils.redact import redact

_WIDTH = 130


def to_yaml(config: Any) -> str:
    """The whole configuration; values that look like secrets (in `ray_init`, ...) are blanked."""
    import yaml  # an eighth of the time --help may take

    return str(yaml.safe_dump(redact(to_dict(config)), sort_keys=False, allow_unicode=True, width=_WIDTH))


def settings(cls: type) -> str:
    """Every setting of a config class, grouped by section: name, default, meaning, type."""
    lines: list[str] = []
    group = None
    for leaf in leaves(cls):
        section, _, name = leaf.key.rpartition(".")
        if section != group:
            lines += ["", f"{section}." if section else "(top level)"]
            group = section
        text = f"{leaf.doc} [{describe(leaf.annotation)}]"
        left = f"  {name} = {scalar(leaf.default)}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent=left.ljust(43) + " ", subsequent_indent=" " * 44)
    return "\n".join(lines)
