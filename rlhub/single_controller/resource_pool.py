"""`ResourcePool`: how many worker processes on which nodes.  Plain numbers; backends turn them into processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhub.errors import ConfigError
from rlhub.registry import suggest


class ResourcePool:
    """process_on_nodes: number of ranks on each node, nodes may differ; ranks are numbered node by node.

    max_colocate_count: how many worker groups may share one rank's device as separate processes.
    """

    def __init__(self, process_on_nodes: Sequence[int], max_colocate_count: int = 1) -> None:
        if not process_on_nodes or min(process_on_nodes) < 1:
            raise ConfigError(f"a resource pool needs at least one process on every node, got {list(process_on_nodes)}")
        if max_colocate_count < 1:
            raise ConfigError(f"max_colocate_count must be at least 1, got {max_colocate_count}")
        self.process_on_nodes = list(process_on_nodes)
        self.max_colocate_count = max_colocate_count

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    def local_ranks(self) -> list[int]:
        """Per rank, its number on its node."""
        return [local for count in self.process_on_nodes for local in range(count)]

    def local_world_sizes(self) -> list[int]:
        """Per rank, how many ranks its node has."""
        return [count for count in self.process_on_nodes for _ in range(count)]

    def __add__(self, other: ResourcePool) -> ResourcePool:
        count = max(self.max_colocate_count, other.max_colocate_count)
        return ResourcePool(self.process_on_nodes + other.process_on_nodes, count)


def check_mapping(spec: Mapping[str, Sequence[int]], mapping: Mapping[str, str]) -> None:
    """Every role must map to a pool that exists."""
    problems = [
        f"role {role!r} is mapped to pool {pool!r}{suggest(pool, spec)} pools: {', '.join(spec) or 'none'}"
        for role, pool in mapping.items()
        if pool not in spec
    ]
    if problems:
        raise ConfigError(problems)
