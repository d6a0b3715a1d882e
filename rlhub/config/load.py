"""Loads defaults, YAML and the command line into one typed configuration, and reports all problems at once.

The dataclasses hold the defaults; YAML and overrides hold the differences.  No key is dropped: an unknown key is an error with
the nearest known key, or with the reason why there is none.

Values are converted to the fields' types without loss and without guessing: `1e3` is an int where an int is expected, `1.5` is
not; `True` is never a number; a number becomes a string, and a single item a list of one, where that is expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from rlhub.config import compose
from rlhub.config.aliases import translate as foreign
from rlhub.config.schema import (
    LARGEST_INT,
    Range,
    default_of,
    describe,
    hints,
    is_free,
    leaves,
    options,
    section_class,
    sections,
    to_dict,
)
from rlhub.errors import ConfigError
from rlhub.registry import suggest
from rlhub.utils.redact import redact

C = TypeVar("C")


class _MismatchError(ValueError):
    """The value is not of the expected type; the message has the reason if that is not obvious."""


def build(cls: type[C], values: Mapping[str, Any], problems: list[str], *, prefix: str = "") -> C:
    """Returns an instance of `cls`, with the default in place of an absent or wrong value, and appends wrong ones to `problems`.

    Unknown keys are ignored: the loader has reported them with the keys as the user wrote them.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    arguments: dict[str, Any] = {}
    for name, annotation in hints(cls).items():  # type: ignore[arg-type]  # mypy does not take a type variable for hashable
        if name not in values:
            continue
        key, value, section = f"{prefix}{name}", values[name], section_class(annotation)
        if section is not None and isinstance(value, Mapping):
            arguments[name] = build(section, value, problems, prefix=f"{key}.")
            continue
        try:
            arguments[name] = convert(annotation, value)
        except _MismatchError as error:
            detail = f": {error}" if str(error) else ""
            problems.append(f"{key}: got {redact(value, name)!r}, expected {describe(annotation)}{detail}")
            arguments[name] = default_of(fields[name])
    return cls(**arguments)


def convert(annotation: Any, value: Any) -> Any:
    """Returns `value` converted to the type `annotation`; raises ValueError if it cannot be converted."""
    choices = options(annotation)
    if value is None:
        if type(None) in choices or Any in choices:
            return None
        raise _MismatchError("null is not allowed here")
    failure = _MismatchError()
    for option in sorted(choices, key=_is_list):  # a string first, then a list of one
        try:
            return _convert_one(option, value)
        except _MismatchError as error:
            failure = error if str(error) else failure
    raise failure


def _is_list(option: Any) -> bool:
    origin: Any = typing.get_origin(option)
    return origin is list


def _convert_one(option: Any, value: Any, *, infinite: bool = False) -> Any:
    origin: Any = typing.get_origin(option)
    arguments = typing.get_args(option)
    if option is Any:
        return value
    if origin is Annotated:
        return _within(_convert_one(arguments[0], value, infinite=arguments[1].infinite), arguments[1])
    if origin is Literal:
        return _choice(arguments, value)
    if origin is dict:
        if isinstance(value, Mapping):
            _refuse_nan(value)
            return dict(value)
        raise _MismatchError
    if origin is list:
        if isinstance(value, Mapping):
            raise _MismatchError
        return [convert(arguments[0], item) for item in (value if isinstance(value, list | tuple) else [value])]
    return _scalar(option, value, infinite=infinite)


def _within(value: Any, bounds: Range) -> Any:
    if bounds.holds(value):
        return value
    raise _MismatchError(f"out of range, must be {bounds}")


def _choice(choices: tuple[Any, ...], value: Any) -> Any:
    if value in choices:
        return value
    raise _MismatchError(suggest(str(value), map(str, choices)).lstrip("; "))


def _refuse_nan(value: Any, where: str = "") -> None:
    """Raises _MismatchError for NaN in a mapping with keys of the user's own, where no range is known but NaN is never valid."""
    if isinstance(value, Mapping | list | tuple):
        for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            _refuse_nan(inner, f"{where}.{name}" if where else str(name))
    elif isinstance(value, float) and math.isnan(value):
        raise _MismatchError(f"{where} is not a number")


def _scalar(wanted: Any, value: Any, *, infinite: bool) -> Any:
    if wanted is type(None) or dataclasses.is_dataclass(wanted):
        raise _MismatchError
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted is int and is_number and (isinstance(value, int) or value.is_integer()):
        if abs(value) > LARGEST_INT:
            raise _MismatchError(f"larger than {LARGEST_INT}")
        return int(value)
    if wanted is float and is_number:
        return _finite(value, infinite=infinite)
    if wanted is str and (isinstance(value, str) or is_number):
        return str(value)
    raise _MismatchError


def _finite(value: int | float, *, infinite: bool) -> float:
    """Returns the value as a float.  infinite: infinity is allowed."""
    try:
        number = float(value)
    except OverflowError:
        raise _MismatchError("larger than any floating-point number") from None
    if math.isnan(number) or (math.isinf(number) and not infinite):
        raise _MismatchError("out of range, must be a finite number")
    return number


INHERITED = {
    "critic.model": "actor_rollout_ref.model",
    "critic.fsdp_config": "actor_rollout_ref.actor.fsdp_config",
    "critic.megatron": "actor_rollout_ref.actor.megatron",
    "actor_rollout_ref.ref.fsdp_config": "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.ref.megatron": "actor_rollout_ref.actor.megatron",
    "reward_model.megatron": "actor_rollout_ref.actor.megatron",
    "ref_fsdp_config": "fsdp_config",
    "ref_megatron": "megatron",
}
"""Optional sections, and the section whose values each takes, field by field, where the user set none."""

SHORTEST_PART = 3
"""Least characters of a part of a name that is a hint; shorter parts occur in too many names."""


@dataclass(slots=True, kw_only=True)
class LoadedConfig(Generic[C]):
    """A loaded configuration with its problems.

    config: typed, with wrong settings at their defaults; set_keys: the keys that the user set (YAML or command line); problems:
    all problems of the settings; faulty: the keys of those problems, for which rules between settings would only confuse; notes:
    warnings about keys that are accepted and have no effect here.
    """

    config: C
    set_keys: frozenset[str]
    problems: list[str]
    faulty: frozenset[str]
    notes: list[str]


def load(cls: type[C], config_name: str, overrides: Sequence[str] = (), *, config_dir: str | None = None) -> C:
    """Returns the configuration, in which `derive` has not yet filled the open fields.  Raises ConfigError with all problems."""
    loaded = collect(cls, config_name, overrides, config_dir=config_dir)
    if loaded.problems:
        raise ConfigError(loaded.problems)
    return loaded.config


def collect(cls: type[C], config_name: str, overrides: Sequence[str] = (), *, config_dir: str | None = None) -> LoadedConfig[C]:
    """Loads as `load` does, but returns the problems together with the configuration of all other settings."""
    problems: list[str] = []
    tree = compose.compose(config_name, overrides, config_dir, problems)
    return interpret(cls, tree, problems)


def interpret(cls: type[C], tree: Mapping[str, Any], problems: list[str]) -> LoadedConfig[C]:
    """Returns the configuration of the user's settings over the defaults.

    tree: the user's settings as nested containers; problems: those found before, to which this function appends.
    """
    free = free_keys(cls)
    given = _lifted(dict(flatten(tree, free)), free)
    said = _below_free(foreign.resolve_aliases(given, problems), free)
    refused = foreign.refused_values(said)
    problems += refused.values()
    known = {leaf.key for leaf in leaves(cls)}
    faulty, notes = set(refused), list[str]()
    accepted: dict[str, Any] = {}
    names_of_sections = {key for key, _ in sections(cls)}
    for key, value in said.items():
        if key in refused:
            continue
        if key in known or (key in names_of_sections and not isinstance(value, Mapping)):
            accepted[key] = value
        elif (verdict := foreign.judge(key, value, said)) is not None:
            problems += [verdict] if verdict else []
            notes.append(foreign.note(key, value))
        elif value != {}:
            _report_unknown(key, known | names_of_sections, problems, faulty)
    values = _complete(cls, accepted)
    values = compose.resolve(values, problems)
    problems += [f"{key}: is marked ??? (required) and not set" for key, value in said.items() if value == "???"]
    before = len(problems)
    config = build(cls, values, problems)
    faulty |= {problem.partition(":")[0] for problem in problems[before:]}
    return LoadedConfig(
        config=config,
        set_keys=frozenset(accepted),
        problems=problems,
        faulty=frozenset(faulty),
        notes=[text for text in notes if text],
    )


def validate(config: Any) -> list[str]:
    """Returns the problems of types and ranges in a configuration built in code; [] if there are none."""
    problems: list[str] = []
    build(type(config), to_dict(config), problems)
    return problems


def flatten(tree: Mapping[str, Any], stop: frozenset[str] = frozenset(), prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (full key, value) of a nested mapping; mappings at the keys in `stop` stay whole."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in stop:
            yield from flatten(value, stop, f"{key}.")
        else:
            yield key, value


def free_keys(cls: type) -> frozenset[str]:
    """Returns the keys of settings that are mappings with keys of the user's own."""
    return frozenset(leaf.key for leaf in leaves(cls) if is_free(leaf.annotation))


def _lifted(said: Mapping[str, Any], free: frozenset[str]) -> dict[str, Any]:
    """Returns the flat settings, in which other frameworks' settings inside a free mapping become keys of their own."""
    found: dict[str, Any] = {}
    for key, value in said.items():
        found[key] = _taken_out(value, key, found) if key in free and isinstance(value, Mapping) else value
    return found


def _taken_out(tree: Mapping[str, Any], prefix: str, found: dict[str, Any]) -> dict[str, Any]:
    rest: dict[str, Any] = {}
    for name, value in tree.items():
        key = f"{prefix}.{name}"
        if foreign.names_in_full(key):
            found[key] = value
        else:
            rest[name] = _taken_out(value, key, found) if isinstance(value, Mapping) else value
    return rest


def _below_free(said: Mapping[str, Any], free: frozenset[str]) -> dict[str, Any]:
    """Returns the flat settings, in which settings that an alias has put below a free mapping are inside that mapping."""
    merged = {key: dict(value) if key in free and isinstance(value, Mapping) else value for key, value in said.items()}
    for key in said:
        owner = next((name for name in free if key.startswith(f"{name}.")), None)
        if owner is not None and not foreign.names_in_full(key):
            merged[owner] = merged.get(owner) or {}
            _put(merged[owner], key[len(owner) + 1 :], merged.pop(key))
    return merged


def _complete(cls: type, accepted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested values: the defaults, then inherited sections, then the user's settings."""
    tree = to_dict(cls())
    for key, value in accepted.items():
        if not any(key == target or key.startswith(f"{target}.") for target in INHERITED):
            _put(tree, key, value)
    names = {key for key, _ in sections(cls)}
    for target, source in INHERITED.items():
        parent, _, _ = target.rpartition(".")
        if target in names and (not parent or isinstance(_get(tree, parent), Mapping)):  # else a fault that `build` names
            _put(tree, target, dict(_get(tree, source) or {}))
    for key, value in accepted.items():
        if any(key == target or key.startswith(f"{target}.") for target in INHERITED):
            _put(tree, key, value)
    return tree


def _get(tree: Mapping[str, Any], key: str) -> Any:
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    node = tree
    for part in parents:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[last] = value


def _report_unknown(key: str, known: set[str], problems: list[str], faulty: set[str]) -> None:
    near = nearest(key, known)
    faulty.update(near[:1])
    hint = f"; did you mean {' or '.join(near)}?" if near else "; --help lists all settings"
    problems.append(f"{key}: no such setting{hint}")


def nearest(key: str, known: set[str]) -> list[str]:
    """Returns up to three known keys that the user may have meant: a part of a name, a typo in one, a misplaced name, or a typo
    anywhere."""
    parent, _, name = key.rpartition(".")
    while parent and parent not in known:
        parent, _, above = parent.rpartition(".")
        name = f"{above}.{name}"
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == parent}
    if parts := [full for sibling, full in sorted(siblings.items()) if _is_part(name, sibling)]:
        return parts[:3]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    if close:
        return [siblings[close[0]]]
    last = key.rpartition(".")[2]
    same_name = [other for other in sorted(known) if other.rpartition(".")[2] == last]
    if same_name:
        return difflib.get_close_matches(key, same_name, n=3, cutoff=0.0)
    return difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.75)


def _is_part(name: str, whole: str) -> bool:
    """Returns True where `whole` begins with `name`, or has all of its words."""
    return len(name) >= SHORTEST_PART and (whole.startswith(name) or set(name.split("_")) <= set(whole.split("_")))
