"""The conditions under which a node runs: comparisons of numbers, settings and the step, as text.

`when="step > trainer.critic_warmup"` is parsed and never run as Python: numbers, strings, True and False, dotted settings of the
configuration, `step`, comparisons, + - * %, and, or, not.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

from rlhub.registry import suggest

STEP = "step"
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
}
ALLOWED = (ast.Constant, ast.Name, ast.Attribute, ast.Compare, ast.BinOp, ast.BoolOp, ast.UnaryOp)
ALLOWED_OPERATORS = (*COMPARISONS, *ARITHMETIC, ast.And, ast.Or, ast.Not, ast.USub, ast.Load)


def condition_problem(text: str, settings: Any = None) -> str | None:
    """Returns what is wrong with a condition, or None.  settings: the configuration whose names it may use; None: any."""
    try:
        body = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        return f"is no condition: {error.msg}"
    if any(not isinstance(node, (*ALLOWED, *ALLOWED_OPERATORS)) for node in ast.walk(body)):
        return "may have numbers, settings, step, comparisons, + - * %, and, or, not, and nothing else"
    for name in sorted(names_in(body) - {STEP}):
        known = [] if settings is None else list(setting_names(settings))
        if settings is not None and name not in known:
            return f"names {name!r}, which is no setting{suggest(name, [*known, STEP])}"
    return None


def holds(text: str, step: int, settings: Any) -> bool:
    """Returns whether a condition that has no problem holds at a step."""
    return bool(_value(ast.parse(text, mode="eval").body, step, settings))


def names_in(node: ast.expr) -> set[str]:
    """Returns the dotted names in an expression."""
    if isinstance(node, ast.Name | ast.Attribute):
        return {ast.unparse(node)}
    return {name for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr) for name in names_in(child)}


def setting_names(settings: Any, prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of all settings of a configuration's dataclasses."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        yield prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from setting_names(value, f"{prefix}{field.name}.")


def _value(node: ast.expr, step: int, settings: Any) -> Any:
    def value(child: ast.expr) -> Any:
        return _value(child, step, settings)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return step if node.id == STEP else getattr(settings, node.id)
        case ast.Attribute():
            return getattr(value(node.value), node.attr)
        case ast.BoolOp(op=ast.And()):
            return all(map(value, node.values))
        case ast.BoolOp():
            return any(map(value, node.values))
        case ast.UnaryOp(op=ast.Not()):
            return not value(node.operand)
        case ast.UnaryOp():
            return -value(node.operand)
        case ast.BinOp():
            return ARITHMETIC[type(node.op)](value(node.left), value(node.right))
        case ast.Compare():
            values = [value(side) for side in (node.left, *node.comparators)]
            pairs = zip(node.ops, values, values[1:], strict=False)
            return all(COMPARISONS[type(sign)](left, right) for sign, left, right in pairs)
    raise AssertionError(f"{ast.dump(node)} was checked")
