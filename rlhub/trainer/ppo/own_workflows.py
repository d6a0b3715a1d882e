"""A workflow of the user's own, looked at before any episode: whether it can be made, and the settings it reads."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from rlhub.workflows.base import RolloutWorkflow
from rlhub.workflows.settings import fill_knobs


def class_problems(found: Callable[..., Any]) -> list[str]:
    """What keeps it from being made from its parts; of a function that makes one only its parameters can be told."""
    if isinstance(found, type):
        if not issubclass(found, RolloutWorkflow):
            return ["no subclass of RolloutWorkflow (rlhub.workflows.base)"]
        if found.__abstractmethods__:
            return [f"lacks {', '.join(sorted(found.__abstractmethods__))}"]
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        return [f"is made from its parts alone, and does not take them so: {error}"]
    except ValueError:  # a callable without a signature
        return []
    return []


def knobs_of(found: Callable[..., Any]) -> type | None:
    """The dataclass that its settings fill, where it says so as the workflows of rlhub do: `fill_knobs(Knobs, parts.kwargs)` when
    it is made.  None: it may read them in a way of its own."""
    maker = inspect.unwrap(found.__init__ if isinstance(found, type) else found)  # type: ignore[misc]
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(maker)))
    except (OSError, TypeError, SyntaxError):
        return None
    names = [
        call.args[0].id
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and maker.__globals__.get(call.func.id) is fill_knobs
        and call.args
        and isinstance(call.args[0], ast.Name)
    ]
    classes = [maker.__globals__.get(name) for name in names]
    only = classes[0] if len(classes) == 1 else None
    return only if isinstance(only, type) and dataclasses.is_dataclass(only) else None
