"""Compares the record of SGLang's HTTP interface, which the tests answer from, with the sources in a wheel of SGLang.

    python scripts/checks/sglang_contract.py WHEEL [--write]

The wheel (`pip download sglang --no-deps`) is read and not installed, so a machine without a GPU will do.  Compared are the
routes with their methods, the fields of the classes that requests are read into, and the names that answers are made of.  The
exit status is 1 where the record has another version, or a route or field that the wheel has not.  --write brings version and
fields of the record up to the wheel's; bodies of answers stay as they are, to be looked at by hand.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORD = Path(__file__).resolve().parents[2] / "tests" / "support" / "sglang_record.json"
SERVER, REQUESTS = "sglang/srt/entrypoints/http_server.py", "sglang/srt/managers/io_struct.py"
SAMPLING = "sglang/srt/sampling/sampling_params.py"
ANSWERS = (SERVER, "sglang/srt/managers/tokenizer_manager.py", "sglang/srt/managers/schedule_batch.py", SAMPLING)
"""The files whose string constants and fields answers are made of."""


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    record = json.loads(RECORD.read_text())
    with zipfile.ZipFile(options.wheel) as wheel:
        trees = {name: ast.parse(wheel.read(name)) for name in {*ANSWERS, REQUESTS}}
    version = options.wheel.name.split("-")[1]
    if options.write:
        record["version"] = version
        for call in record["calls"].values():
            for key, fields in call.get("fields", {}).items():
                call["fields"][key] = sorted(fields_of(trees, key)) or fields
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    problems = [*differences(record, trees)]
    if record["version"] != version:
        problems.append(f"the record is of version {record['version']}, the wheel of {version}")
    print("\n".join(problems) or f"the record agrees with sglang {version}")
    return int(bool(problems))


def differences(record: dict[str, Any], trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yields a sentence for each route, field or name of the record that the sources lack."""
    routes = {(path, method) for path, method in routes_of(trees[SERVER])}
    words = {word for tree in trees.values() for word in words_of(tree)}
    for path, call in record["calls"].items():
        if (path, call["method"]) not in routes:
            yield f"{call['method']} {path} is no route"
        for name, fields in call.get("fields", {}).items():
            for field in sorted(set(fields) - fields_of(trees, name)):
                yield f"{path}: {name} has no field {field}"
        for answer in call["answers"].values():
            for key in sorted(set(keys_of(answer["body"])) - words):
                yield f"{path}: no answer is made with {key!r}"


def routes_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields (path, method) of each route that a decorator names."""
    for node in ast.walk(tree):
        for call in getattr(node, "decorator_list", ()):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
                path, kind = call.args[0], call.func.attr
                named = {keyword.arg: keyword.value for keyword in call.keywords}
                methods = ast.literal_eval(named["methods"]) if "methods" in named else [kind.upper()]
                if isinstance(path, ast.Constant):
                    yield from ((str(path.value), method) for method in methods)


def fields_of(trees: dict[str, ast.Module], name: str) -> set[str]:
    """Returns the annotated fields of a class."""
    for tree in trees.values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return {
                    item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return set()


def words_of(tree: ast.Module) -> Iterator[str]:
    """Yields the string constants of a module."""
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def keys_of(body: Any) -> Iterator[str]:
    """Yields every key of an answer."""
    for key, value in body.items() if isinstance(body, dict) else ():
        yield key
        yield from keys_of(value)


if __name__ == "__main__":
    sys.exit(main())
