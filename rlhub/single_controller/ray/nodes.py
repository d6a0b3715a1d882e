"""The cluster's nodes as typed rows (Ray's own functions for them carry no types)."""

from __future__ import annotations

from dataclasses import dataclass

import ray
from ray._private import state


@dataclass(slots=True, kw_only=True, frozen=True)
class Node:
    """A live node.  total, free: amounts by resource name ("CPU", "GPU", ...)."""

    node_id: str
    address: str
    total: dict[str, float]
    free: dict[str, float]


def live_nodes() -> list[Node]:
    """The cluster as it is now."""
    free = state.available_resources_per_node()  # type: ignore[no-untyped-call]
    return [
        Node(
            node_id=row["NodeID"],
            address=row["NodeManagerAddress"],
            total=dict(row["Resources"]),
            free=dict(free.get(row["NodeID"], {})),
        )
        for row in ray.nodes()  # type: ignore[no-untyped-call]
        if row["Alive"]
    ]


def own_address() -> str:
    """Address of the node that this process runs on."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def head_address() -> str:
    """host:port of the cluster's head (its GCS)."""
    return str(ray.get_runtime_context().gcs_address)


def describe_nodes() -> str:
    """One phrase per live node: address, free and total CPUs and GPUs."""
    return "; ".join(_describe(node) for node in live_nodes()) or "no live node"


def _describe(node: Node) -> str:
    counts = [f"{node.free.get(kind, 0):g} of {node.total[kind]:g} {kind}s free" for kind in ("CPU", "GPU") if kind in node.total]
    return f"node {node.address}: {', '.join(counts) or 'no CPUs or GPUs'}"
