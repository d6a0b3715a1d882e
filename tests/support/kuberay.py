"""KubeRay's schema of its Kubernetes resources, and the problems of a manifest under it.

The schema is made from the custom resource definitions of KubeRay's repository (Apache-2.0), at the version in its `$comment`:

    python -m tests.support.kuberay v1.7.0 ray.io_rayclusters.yaml ray.io_rayjobs.yaml

It has the version v1 of each kind, without its status.  Fields that a definition does not list are refused, as `kubectl apply`
does.  Rules in CEL (`x-kubernetes-validations`) are left out: only the operator's cluster evaluates them.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

SCHEMA = Path(__file__).with_name("kuberay.json")
KEPT = ("type", "properties", "items", "required", "enum", "additionalProperties", "anyOf", "pattern", "minimum", "maximum",
        "minItems", "maxItems", "minLength", "maxLength", "not", "oneOf", "allOf")  # fmt: skip
SHARED_BYTES = 60
"""Schemas of at least so many bytes that occur twice stand once, in `$defs`."""


def problems(document: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a resource, each with the path of the field; [] for a kind that is not KubeRay's."""
    schema = json.loads(SCHEMA.read_text())
    if not str(document.get("apiVersion", "")).startswith("ray.io/"):
        return []
    if document["apiVersion"] != "ray.io/v1" or document.get("kind") not in schema["properties"]:
        return [
            f"no resource {document['apiVersion']} {document.get('kind')}; known: {', '.join(schema['properties'])} of ray.io/v1"
        ]
    found = Draft202012Validator(schema).iter_errors({document["kind"]: document})
    return [f"{'.'.join(map(str, list(error.absolute_path)[1:]))}: {error.message}" for error in found]


def closed(node: Any) -> Any:
    """Returns a definition's schema as one of JSON Schema: fields that are not listed are refused, those with a default are not
    required."""
    if not isinstance(node, dict):
        return node
    if node.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    kept = mapped({key: node[key] for key in KEPT if key in node}, closed)
    if "properties" in kept and not node.get("x-kubernetes-preserve-unknown-fields"):
        kept.setdefault("additionalProperties", False)
    needed = [name for name in kept.pop("required", []) if "default" not in node["properties"].get(name, {})]
    return {**kept, "required": needed} if needed else kept


def mapped(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the schema with the schemas directly inside it changed."""
    changed = dict(schema)
    for key in schema.keys() & {"items", "additionalProperties", "not"}:
        changed[key] = change(schema[key])
    for key in schema.keys() & {"anyOf", "oneOf", "allOf"}:
        changed[key] = [change(each) for each in schema[key]]
    if "properties" in schema:
        changed["properties"] = {name: change(each) for name, each in schema["properties"].items()}
    return changed


def shared(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema with parts that occur more than once in `$defs`."""
    counts: collections.Counter[str] = collections.Counter()
    names: dict[str, str] = {}
    definitions: dict[str, Any] = {}

    def count(node: Any) -> Any:
        if isinstance(node, dict):
            counts[json.dumps(node, sort_keys=True)] += 1
            mapped(node, count)
        return node

    def replaced(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        text = json.dumps(node, sort_keys=True)
        if counts[text] < 2 or len(text) < SHARED_BYTES:
            return mapped(node, replaced)
        if text not in names:
            names[text] = f"d{len(names)}"
            definitions[names[text]] = mapped(node, replaced)
        return {"$ref": f"#/$defs/{names[text]}"}

    count(schema)
    return {**replaced(schema), "$defs": definitions}


def main(version: str, *files: str) -> None:
    kinds = {}
    for file in files:
        definition = yaml.safe_load(Path(file).read_text())
        (served,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
        schema = closed(served["schema"]["openAPIV3Schema"])
        del schema["properties"]["status"]
        kinds[definition["spec"]["names"]["kind"]] = schema
    comment = f"Made by tests/support/kuberay.py from the definitions of KubeRay {version} (Apache-2.0)."
    whole = {"$comment": comment, **shared({"type": "object", "properties": kinds})}
    SCHEMA.write_text(json.dumps(whole, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
