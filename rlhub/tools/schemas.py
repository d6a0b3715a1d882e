"""Builds the schema of a tool from a typed Python function, and checks arguments against a schema.

def weather(city: str, days: int = 1) -> str:
    '''Forecast for a city.

    city: its name in English.  Or, under "Args:", the same lines.
    '''
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from rlhub.registry import suggest
from rlhub.tools.base import ToolError
from rlhub.utils.tool_calls import ToolSchema, schema_name

TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_DESCRIBED = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?\s*:\s+(\S.*)$")
_SECTION = re.compile(r"^\s*(?:Args|Arguments|Parameters|Returns|Raises|Yields)\s*:?\s*$")


def schema_of(function: Callable[..., Any], *, name: str = "", hidden: Collection[str] = ()) -> ToolSchema:
    """Returns the schema of a function with annotated parameters and a docstring.  hidden: parameters that the model does not
    see.

    Raises ToolError if the function cannot be described.
    """
    called = name or function.__name__
    summary, described = read_docstring(inspect.getdoc(function) or "")
    if not summary:
        raise ToolError(f"tool {called}: the function needs a docstring, which tells the model what the tool does")
    try:
        hints = typing.get_type_hints(function)
    except NameError as error:
        raise ToolError(f"tool {called}: its type hints cannot be read: {error}") from error
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in hidden:
            continue
        properties[parameter.name] = _property(called, parameter, hints)
        if parameter.name in described:
            properties[parameter.name]["description"] = described[parameter.name]
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": called, "description": summary, "parameters": parameters}}


def _property(tool: str, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> dict[str, Any]:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise ToolError(f"tool {tool}: parameter {parameter} cannot be given by name; a tool takes named parameters")
    if parameter.name not in hints:
        raise ToolError(f"tool {tool}: parameter {parameter.name} has no type hint, which its schema is made from")
    return json_type(hints[parameter.name], f"tool {tool}: parameter {parameter.name}")


def json_type(hint: Any, where: str) -> dict[str, Any]:
    """Returns the JSON schema of a type hint: str, int, float, bool, list, dict with text keys, Literal, unions of these,
    None."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint in TYPES:
        return {"type": TYPES[hint]}
    if origin is Literal:
        return {"enum": list(inner)}
    if hint is list or origin is list:
        return {"type": "array"} | ({"items": json_type(inner[0], where)} if inner else {})
    if hint is dict or (origin is dict and inner[0] is str):
        return {"type": "object"} | (
            {"additionalProperties": json_type(inner[1], where)} if inner and inner[1] is not Any else {}
        )
    if origin in (typing.Union, types.UnionType):
        options = [json_type(option, where) for option in inner if option is not type(None)]
        return options[0] if len(options) == 1 else {"anyOf": options}
    raise ToolError(
        f"{where} has the type {hint}, which has no JSON schema here; use str, int, float, bool, list[...], dict[str, ...] or "
        "Literal[...]"
    )


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns (the summary, which is the first paragraph; parameter -> description)."""
    summary = " ".join(text.partition("\n\n")[0].split())
    described: dict[str, str] = {}
    current = ""
    for line in text.partition("\n\n")[2].splitlines():
        if _SECTION.match(line) or not line.strip():
            current = ""
        elif found := _DESCRIBED.match(line):
            current = found[1]
            described[current] = found[2].strip()
        elif current:
            described[current] += " " + line.strip()
    return summary, described


def checked_arguments(schema: ToolSchema, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with the types of the schema; a number written as text is converted.  Raises ToolError, which the
    model reads."""
    parameters = schema["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    for name in arguments:
        if name not in properties:
            known = ", ".join(properties) or "none"
            raise ToolError(f"{schema_name(schema)} has no argument {name!r}{suggest(name, properties) or ';'} it takes: {known}")
    for name in parameters.get("required") or ():
        if name not in arguments:
            raise ToolError(f"{schema_name(schema)} needs the argument {name!r}")
    return {name: _fitted(f"argument {name!r}", properties[name], value) for name, value in arguments.items()}


def _fitted(where: str, schema: Mapping[str, Any], value: Any) -> Any:
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{where} must be one of {', '.join(map(repr, schema['enum']))}, not {value!r:.80}")
    wanted = schema.get("type")
    if wanted in ("integer", "number"):
        return _number(where, str(wanted), value)
    kinds: dict[str, type] = {"string": str, "boolean": bool, "array": list, "object": dict}
    kind = kinds.get(wanted) if isinstance(wanted, str) else None
    if kind is not None and not isinstance(value, kind):
        if kind is str and isinstance(value, int | float):
            return str(value)
        raise ToolError(f"{where} must be of type {wanted}, not {type(value).__name__}")
    return value


def _number(where: str, wanted: str, value: Any) -> int | float:
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number) or (wanted == "integer" and not number.is_integer()):
        raise ToolError(f"{where} must be of type {wanted}, not {value!r:.80}")
    return (value if isinstance(value, int) else int(number)) if wanted == "integer" else number
