"""Loads the user's own code, which settings name as `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhub.errors import LoadError


def load_target(target: str) -> Any:
    """Returns the named object.  Raises LoadError with the traceback of the cause if it cannot be loaded."""
    module, name = _parts(target)
    try:
        return _attribute(module, name)
    except FileNotFoundError as error:
        raise LoadError(str(error)) from error
    except Exception as error:  # boundary to the user's code: whatever its import raises
        raise LoadError(f"cannot load {target}:\n{traceback.format_exc()}") from error


def absolute(target: str) -> str:
    """Returns the target with the whole path of its file, so that a process in another folder finds it."""
    module, name = _parts(target)
    return f"{Path(module).expanduser().resolve()}:{name}" if module.endswith(".py") else target


def resolve(target: str) -> Any:
    """Returns the named object; raises whatever the user's code raises at its import."""
    return _attribute(*_parts(target))


def _parts(target: str) -> tuple[str, str]:
    module, _, name = target.rpartition(":")
    if not module or not name:
        raise LoadError(f"{target!r} is neither 'module:name' nor 'path/to/file.py:name'")
    return module, name


def _attribute(module: str, name: str) -> Any:
    value: Any = module_from_file(module) if module.endswith(".py") else importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def module_from_file(path: str) -> ModuleType:
    """Returns a file's module, which is loaded once per process.  It can import modules of its own folder."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise FileNotFoundError(f"no such file: {file}")
    name = f"rlhub_user_{file.stem}_{abs(hash(str(file))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # at the end: a neighbour may be imported, but shadows nothing
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
