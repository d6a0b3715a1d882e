"""Plain containers -> typed dataclasses, collecting every problem instead of stopping at the first.

The rules: no conversion that loses or guesses (`1e3` is an int where one is wanted, `1.5` is not; `True` is never a
number; a number is a string where one is wanted), a lone item where a list is wanted is a list of one.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from rlhub.config.schema import LARGEST_INT, Bounds, default_of, describe, hints, options, section_class
from rlhub.registry import suggest
from rlhub.utils.redact import redact

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
            problems.append(f"{key}: got {redact(value, name)!r}, expected {describe(annotation)}{detail}")
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


def _within(value: Any, bounds: Bounds) -> Any:
    if bounds.holds(value):
        return value
    raise _MismatchError(f"out of range, must be {bounds}")


def _choice(choices: tuple[Any, ...], value: Any) -> Any:
    if value in choices:
        return value
    raise _MismatchError(suggest(str(value), map(str, choices)).lstrip("; "))


def _refuse_nan(value: Any, where: str = "") -> None:
    """Of a mapping whose keys are the user's own: what a number means is not known here, but NaN means nothing anywhere."""
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
    """As a float; infinity where it means that there is no limit."""
    try:
        number = float(value)
    except OverflowError:
        raise _MismatchError("larger than any floating-point number") from None
    if math.isnan(number) or (math.isinf(number) and not infinite):
        raise _MismatchError("out of range, must be a finite number")
    return number
