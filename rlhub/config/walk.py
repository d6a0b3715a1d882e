"""Plain containers -> typed dataclasses, collecting every problem instead of stopping at the first.

The rules: no conversion that loses or guesses (`1e3` is an int where one is wanted, `1.5` is not; `True` is never a
number; a number is a string where one is wanted), a lone item where a list is wanted is a list of one.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from rlhub.config.schema import Bounds, default_of, describe, hints, options, section_class
from rlhub.registry import suggest

C = TypeVar("C")


class _MismatchError(ValueError):
    """The value is not of the wanted type; the message says why if that is not obvious."""


def build(cls: type[C], values: Mapping[str, Any], problems: list[str], *, prefix: str = "") -> C:
    """An instance of `cls`.  A faulty or absent value is replaced by the default, and a faulty one named in `problems`.

    Unknown keys are not looked at: the loader has reported those with the keys as the user wrote them.
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
            problems.append(f"{key}: got {value!r}, expected {describe(annotation)}{detail}")
            arguments[name] = default_of(fields[name])
    return cls(**arguments)


def convert(annotation: Any, value: Any) -> Any:
    """`value` as `annotation` wants it; raises ValueError if it cannot be."""
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


def _convert_one(option: Any, value: Any) -> Any:
    origin: Any = typing.get_origin(option)
    arguments = typing.get_args(option)
    if option is Any:
        return value
    if origin is Annotated:
        return _within(_convert_one(arguments[0], value), arguments[1])
    if origin is Literal:
        return _choice(arguments, value)
    if origin is dict:
        if isinstance(value, Mapping):
            return dict(value)
        raise _MismatchError
    if origin is list:
        if isinstance(value, Mapping):
            raise _MismatchError
        return [convert(arguments[0], item) for item in (value if isinstance(value, list | tuple) else [value])]
    return _scalar(option, value)


def _within(value: Any, bounds: Bounds) -> Any:
    if bounds.holds(value):
        return value
    raise _MismatchError(f"out of range, must be {bounds}")


def _choice(choices: tuple[Any, ...], value: Any) -> Any:
    if value in choices:
        return value
    raise _MismatchError(suggest(str(value), map(str, choices)).lstrip("; "))


def _scalar(wanted: Any, value: Any) -> Any:
    if wanted is type(None) or dataclasses.is_dataclass(wanted):
        raise _MismatchError
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted is int and is_number and float(value).is_integer():
        return int(value)
    if wanted is float and is_number:
        return float(value)
    if wanted is str and (isinstance(value, str) or is_number):
        return str(value)
    raise _MismatchError
