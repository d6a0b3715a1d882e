"""The types with which the sections are written, and the functions by which the loader and `--help` read them.

A configuration is a tree of dataclasses.  A field's type has its range (`Annotated` with `Range`), and the string below the field
is its documentation, so that meaning, range and default of a setting are each in exactly one place.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rlhub.utils.redact import redact, redact_override


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The range of a number; an end that is None is open.  ge and le include the end, gt and lt do not.

    off: a number outside the range that is allowed and switches the setting off.  infinite: infinity is allowed and means no
    limit; other ranges refuse it, and all refuse NaN.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    off: float | None = None
    infinite: bool = False

    def holds(self, value: float) -> bool:
        """Returns True where `value` is in the range, which NaN never is."""
        return value == self.off or (
            not math.isnan(value)
            and (self.infinite or not math.isinf(value))
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        ends = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        text = " and ".join(f"{sign} {_number(end)}" for sign, end in ends if end is not None)
        return text + (f", or {_number(self.off)} (off)" if self.off is not None else ", or inf" if self.infinite else "")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


LARGEST_INT = 2**63 - 1
"""Largest integer that files, tensors and other programs can hold."""

PositiveInt = Annotated[int, Range(ge=1)]
NonNegativeInt = Annotated[int, Range(ge=0)]
IntOrOff = Annotated[int, Range(ge=-1)]
PositiveFloat = Annotated[float, Range(gt=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]
UnitFloat = Annotated[float, Range(ge=0, le=1)]
Seed = Annotated[int, Range(ge=0, le=2**32 - 1)]  # numpy's generators take no more
PositiveOrInf = Annotated[float, Range(gt=0, infinite=True)]
NonNegativeOrInf = Annotated[float, Range(ge=0, infinite=True)]
PositiveUnitFloat = Annotated[float, Range(gt=0, le=1)]


@dataclass(slots=True, kw_only=True)
class Leaf:
    """One setting: its full key, type, default (as YAML holds it) and documentation."""

    key: str
    annotation: Any
    default: Any
    doc: str


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Returns the resolved types of a config dataclass by field name, ranges included."""
    resolved = typing.get_type_hints(cls, include_extras=True)
    return {field.name: resolved[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def section_class(annotation: Any) -> type | None:
    """Returns the dataclass of a sub-section, also of an optional one, or None for a plain setting."""
    for option in options(annotation):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option
    return None


def options(annotation: Any) -> tuple[Any, ...]:
    """Returns the members of a union; any other annotation as a tuple of one."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def is_free(annotation: Any) -> bool:
    """Returns True for a mapping whose keys are not settings of rlhub (`ray_init`, `adv_kwargs`, ...)."""
    return any(typing.get_origin(option) is dict for option in options(annotation))


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Returns a field's default; every config field has one."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def to_dict(config: Any) -> dict[str, Any]:
    """Returns a config dataclass as nested plain containers."""
    return dataclasses.asdict(config)


def leaves(cls: type, prefix: str = "") -> Iterator[Leaf]:
    """Yields all settings of a config class in the order of the files, those of optional sub-sections included."""
    yield from _leaves(cls, cls(), prefix)


def _leaves(cls: type, instance: Any, prefix: str) -> Iterator[Leaf]:
    documented = docs(cls)
    for name, annotation in hints(cls).items():
        section = section_class(annotation)
        value = None if instance is None else getattr(instance, name)
        if section is not None:
            yield from _leaves(section, value, f"{prefix}{name}.")
        else:
            yield Leaf(key=f"{prefix}{name}", annotation=annotation, default=value, doc=documented.get(name, ""))


def sections(cls: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yields (full key, class) of every sub-section."""
    for name, annotation in hints(cls).items():
        section = section_class(annotation)
        if section is not None:
            yield f"{prefix}{name}", section
            yield from sections(section, f"{prefix}{name}.")


@functools.cache
def docs(cls: type) -> dict[str, str]:
    """Returns the string literals below the fields, read from the source, by field name; {} if there is no source."""
    try:
        body = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0]
    except (OSError, TypeError):
        return {}
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for before, after in zip(body.body, body.body[1:], strict=False):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name) and isinstance(text, str):
            found[before.target.id] = " ".join(text.split())
    return found


def scalar(value: Any) -> str:
    """Returns a value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(scalar(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{scalar(item)}' for name, item in value.items())}}}"
    return str(value)


def setting(key: str, value: Any) -> str:
    """Returns `key=value` for messages, without secrets."""
    return redact_override(f"{key}={scalar(redact(value, key.rpartition('.')[2]))}")


def describe(annotation: Any) -> str:
    """Returns a type in words: "int >= 1, or null"; "one of fp32, bf16"."""
    return ", or ".join(_describe_one(option) for option in options(annotation))


def _describe_one(option: Any) -> str:
    origin = typing.get_origin(option)
    if option is type(None):
        return "null"
    if option is Any:
        return "anything"
    if origin is Annotated:
        return f"{describe(typing.get_args(option)[0])} {typing.get_args(option)[1]}"
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in typing.get_args(option))}"
    if origin is list:
        return f"list of {describe(typing.get_args(option)[0])}"
    if origin is dict:
        return "mapping"
    if dataclasses.is_dataclass(option):
        return "section (mapping)"
    return {int: "int", float: "number", str: "string", bool: "true or false"}[option]
