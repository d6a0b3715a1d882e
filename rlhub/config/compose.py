"""Hydra's part: YAML files and command-line overrides become one flat mapping of what the user said.

Hydra stops at the first bad override, so each is parsed on its own first and all faults are collected.  Every override is
handed on as `++key=value`: whether a key exists is for the loader to say, which knows the types and can suggest.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhub.config.paths import config_dir

logger = logging.getLogger(__name__)


def compose(config_name: str, overrides: Sequence[str], folder: str | None, problems: list[str]) -> dict[str, Any]:
    """The composed YAML plus overrides as nested plain containers, interpolations unresolved.

    folder: a folder of the user's own YAML files, searched before ours.  Faults go to `problems`.
    """
    from hydra import compose as hydra_compose  # hydra costs 0.2 s, which --help must not pay
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folders = [config_dir()]
    if folder is not None:
        folders.insert(0, Path(folder).resolve())
        if not folders[0].is_dir():
            problems.append(f"--config-dir {folder}: no such folder")
            return {}
    arguments = _checked(overrides, folders, problems)
    folders.sort(key=lambda place: not (place / f"{config_name}.yaml").is_file())  # Hydra wants the named file in the first
    if len(folders) > 1:
        arguments.append(f"hydra.searchpath=[file://{folders[1]}]")
    try:
        with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3"):
            composed = hydra_compose(config_name, overrides=arguments)
        plain = OmegaConf.to_container(composed, resolve=False)
    except (HydraException, OmegaConfBaseException, OSError) as error:
        problems.append(f"{config_name}: {_first_line(error)}")
        return {}
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def _checked(overrides: Sequence[str], folders: Sequence[Path], problems: list[str]) -> list[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    good = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            problems.append(f"cannot read {text!r} as key=value{_quoting_hint(text) or ': ' + _first_line(error)}")
            continue
        if override.key_or_group.startswith("hydra."):
            problems.append(f"{text}: Hydra only composes here and makes no run folder; set trainer.default_local_dir instead")
        elif override.is_sweep_override():
            problems.append(f"{text!r} lists several values: rlhub runs one at a time. For a list write key=[a,b]")
        elif override.is_delete() or _is_group(override.key_or_group, folders):
            good.append(text)
        else:
            good.append("++" + text.lstrip("+"))
    return good


def _is_group(key: str, folders: Sequence[Path]) -> bool:
    """A folder of alternatives (`optim=tiny` chooses optim/tiny.yaml), not a setting."""
    return any((folder / key.partition("@")[0]).is_dir() for folder in folders)


def _quoting_hint(text: str) -> str:
    key, sign, value = text.partition("=")
    if not sign:
        return ": there is no '='"
    if any(character in value for character in "=:,()[]{} '\"$"):
        return f"; if the value is text, quote it (twice, for the shell): {key}='\"{value}\"'"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def resolve(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """`values` with interpolations (`${trainer.project_name}`) replaced."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    resolved: dict[str, Any] = {}
    tree = OmegaConf.create(dict(values))
    for key in values:
        try:
            node = OmegaConf.select(tree, key)
            resolved[key] = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as error:
            problems.append(f"{key}: {_first_line(error)}")
            resolved[key] = None
    return resolved
