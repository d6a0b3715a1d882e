"""Composes YAML files and command-line overrides into nested containers of the user's settings, with Hydra.

The YAML files are next to the package in a source tree, and inside it in a wheel.  Hydra stops at the first bad override, so
each override is parsed on its own first and all problems are collected.  Every override is passed on as `++key=value`: the
loader knows the settings and their types, and reports unknown keys with suggestions.

A file that builds on no other file needs only Hydra's parser of overrides and is composed here, since each composition of Hydra
also composes Hydra's own settings (logging, launchers, sweepers: a dozen files), which nothing reads.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhub.errors import ConfigError
from rlhub.utils.redact import redact_override

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

logger = logging.getLogger(__name__)


def config_dir() -> Path:
    """Returns the folder `trainer_configs`."""
    package = Path(__file__).resolve().parents[1]
    for place in (package / "trainer_configs", package.parent / "trainer_configs"):
        if (place / "ppo.yaml").is_file():
            return place
    raise ConfigError(f"no trainer_configs folder in {package} or beside it; the installation is incomplete, install rlhub again")


def example_names() -> list[str]:
    """Returns the names of the starting points for real machines, as --config-name takes them."""
    folder = config_dir()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("examples/*.yaml"))


def is_ours(config_name: str) -> bool:
    """Returns True where `trainer_configs` has a file of that name, with or without .yaml."""
    return (config_dir() / f"{config_name.removesuffix('.yaml')}.yaml").is_file()


REFERENCE = re.compile(r"\$\{(\w+)\.[\w.]+\}")
"""An interpolation with the full key of a setting, whose first part is a top-level section."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """One override.  text: the form that Hydra reads; plain: it sets a key, and neither chooses a file nor deletes a key."""

    text: str
    parsed: Override
    plain: bool


def compose(config_name: str, overrides: Sequence[str], folder: str | None, problems: list[str]) -> dict[str, Any]:
    """Returns the composed YAML with the overrides as nested plain containers, with unresolved interpolations.

    folder: a folder of the user's own YAML files, which is searched before ours.  Problems are appended to `problems`.
    """
    from hydra.errors import HydraException  # hydra costs 0.2 s, which --help must not pay
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    folders = [config_dir()]
    config_name = config_name.removesuffix(".yaml")
    if folder is not None and not Path(folder).is_dir():
        problems.append(f"--config-dir {folder}: no such folder (looked for {Path(folder).resolve()})")
    elif folder is not None:
        folders.insert(0, Path(folder).resolve())
    said = _checked(overrides, folders, problems)
    folders.sort(key=lambda place: not (place / f"{config_name}.yaml").is_file())  # Hydra wants the named file in the first
    file: Path | None = folders[0] / f"{config_name}.yaml"
    if file is not None and not file.is_file():
        if folder is None or len(folders) > 1:
            problems.append(_no_such_file(config_name, folders))
        file = None  # the rest of the command is still checked
    try:
        composed = _put_together(file, said)
        if composed is None and file is not None:
            composed = _by_hydra(config_name, said, folders)
        plain = {} if composed is None else OmegaConf.to_container(composed, resolve=False)
    except (HydraException, OmegaConfBaseException, OSError, ValueError) as error:
        problems.append(f"{config_name}: {_first_line(error)}")
        return {}
    except YAMLError as error:
        problems.append(f"{config_name}: not readable as YAML: {' '.join(str(error).split())}")
        return {}
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def _no_such_file(config_name: str, folders: Sequence[Path]) -> str:
    """Returns the message for a missing file, with the searched folders and the files there are."""
    names = [*sorted({file.stem for place in folders for file in place.glob("*.yaml")}), *example_names()]
    places = " and ".join(str(place) for place in folders)
    hint = "" if len(folders) > 1 else "; for a file of your own name its folder with --config-dir"
    return f"--config-name {config_name}: no {config_name}.yaml in {places}; there are {', '.join(names)}{hint}"


def _by_hydra(config_name: str, said: Sequence[_Said], folders: Sequence[Path]) -> Any:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    arguments = [one.text for one in said]
    if len(folders) > 1:
        arguments.append(f"hydra.searchpath=[file://{folders[1]}]")
    with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3"):
        return hydra_compose(config_name, overrides=arguments)


def _put_together(file: Path | None, said: Sequence[_Said]) -> Any | None:
    """Returns the file (None: an empty one) with the overrides merged as Hydra merges them.

    Returns None where only Hydra can compose it, or where Hydra's error is needed.
    """
    from hydra.core.utils import setup_globals
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if not all(one.plain for one in said):
        return None
    setup_globals()  # Hydra's resolvers, such as ${now:%Y}
    try:
        if file is not None and "@package" in file.read_text():
            return None
        tree = OmegaConf.create() if file is None else OmegaConf.load(file)
        if not isinstance(tree, DictConfig) or "defaults" in tree or "hydra" in tree:
            return None
        for one in said:
            OmegaConf.update(tree, one.parsed.key_or_group, one.parsed.value(), merge=True, force_add=True)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):
        return None
    return tree


def _checked(overrides: Sequence[str], folders: Sequence[Path], problems: list[str]) -> list[_Said]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    good = []
    for text in map(_home_expanded, overrides):
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            problems.append(_unreadable(text, error))
            continue
        if override.key_or_group.startswith("hydra."):
            problems.append(f"{text}: Hydra only composes here and makes no run folder; set trainer.default_local_dir instead")
        elif override.is_sweep_override():
            problems.append(
                f"{redact_override(text)!r} lists several values: rlhub runs one at a time. For a list write key=[a,b]"
            )
        elif override.is_delete() or _is_group(override.key_or_group, folders):
            good.append(_Said(text=text, parsed=override, plain=False))
        else:
            plain = override.package is None and override.key_or_group != "hydra"
            good.append(_Said(text="++" + text.lstrip("+"), parsed=override, plain=plain))
    return good


def _unreadable(text: str, error: Exception) -> str:
    """Returns the message for an override that cannot be parsed, without a secret or the parser's text, which may repeat it."""
    shown = redact_override(text)
    return f"cannot read {shown!r} as key=value{_quoting_hint(shown) or (': ' + _first_line(error) if shown == text else '')}"


def _home_expanded(text: str) -> str:
    """Returns `key=~/folder` with the home folder in place of `~`, which the shell leaves and Hydra reads as a deletion."""
    key, sign, value = text.partition("=")
    return f"{key}={Path(value).expanduser()}" if sign and (value == "~" or value.startswith("~/")) else text


def _is_group(key: str, folders: Sequence[Path]) -> bool:
    """Returns True for a folder of alternatives (`optim=tiny` chooses optim/tiny.yaml), which is not a setting."""
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
    """Returns `values` with their interpolations (`${trainer.project_name}`) resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    involved = _involved(values)
    tree = OmegaConf.create({key: value for key, value in values.items() if key in involved})
    resolved = dict(values)
    for key in involved:
        try:
            node = OmegaConf.select(tree, key)
            resolved[key] = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        except OmegaConfBaseException as error:
            problems.append(f"{key}: {_first_line(error)}")
            resolved[key] = None
    return resolved


def _involved(values: Mapping[str, Any]) -> list[str]:
    """Returns the sections that hold interpolations or to which they refer; all sections, where one is not `${section.name}`."""
    texts = {key: [text for text in _texts(value) if "${" in text] for key, value in values.items()}
    named: set[str] = set()
    for text in (text for found in texts.values() for text in found):
        sections = REFERENCE.findall(text)
        if len(sections) != text.count("${"):
            return list(values)
        named.update(sections)
    return [key for key in values if texts[key] or key in named]


def _texts(value: Any) -> list[str]:
    """Returns all strings in nested containers."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in _texts(item)]
    return [text for item in value for text in _texts(item)] if isinstance(value, list | tuple) else []
