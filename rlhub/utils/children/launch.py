"""How a child's interpreter runs: which Python, with which variables and limits, and on which of the machine's CPUs.

The CPUs are a pure function of the machine's topology.  Memory needs no setting of its own: Linux allocates it on the node of the
CPU that first writes it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

AffinityKind = Literal["none", "cores", "numa"]
SYSTEM = Path("/sys/devices/system")
PATH_VARIABLES = ("PYTHONPATH", "PYTHONHOME")  # they would lead another interpreter to this one's packages


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a child's interpreter runs.

    python: the interpreter, "" for this process's own.  Another one has its own packages; of this process's path it receives only
    the folder of rlhub, as the last one.  variables: environment variables that are set for it.  cpus: the CPUs that it may use,
    () for all.

    memory_kind: what memory_gb limits.  "address_space" includes all that is mapped; graphics drivers reserve more than any
    useful limit.  "data" (RLIMIT_DATA, Linux 4.7) counts private memory that can be written, and neither reservations nor shared
    memory.
    """

    python: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()
    memory_kind: Literal["address_space", "data"] = "address_space"

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Returns these variables as the interpreter receives them."""
        own = {name: value for name, value in variables.items() if not (self.python and name in PATH_VARIABLES)}
        return own | dict(self.variables)


@dataclass(slots=True, kw_only=True, frozen=True)
class Topology:
    """The CPUs that this process may use.  cores: the CPUs of each physical core, which share it.  nodes: those of each memory
    node.  Each is sorted."""

    cores: tuple[tuple[int, ...], ...]
    nodes: tuple[tuple[int, ...], ...]


def read_topology(root: Path = SYSTEM, allowed: Iterable[int] | None = None) -> Topology:
    """Reads the topology from the files of Linux below `root`.  allowed: the CPUs that may be used, None: this process's.

    Where the files do not exist, every CPU is a core, and all are one node.
    """
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    cores = {_listed(root / f"cpu/cpu{cpu}/topology/thread_siblings_list") or (cpu,) for cpu in sorted(usable)}
    nodes = [_listed(path / "cpulist") for path in sorted(root.glob("node/node[0-9]*"), key=_number)]
    return Topology(cores=_kept(sorted(cores), usable), nodes=_kept(nodes, usable) or (tuple(sorted(usable)),))


def cpus_of_processes(kind: AffinityKind, num_processes: int, topology: Topology) -> list[tuple[int, ...]]:
    """Returns the CPUs of each process; () for all.

    cores: each process gets cores of its own, an equal share of them, those of one node together; with more processes than cores
    they share in turn.  numa: each process gets all CPUs of one node, and neighbours get the same one.
    """
    if kind == "none":
        return [()] * num_processes
    if kind == "numa":
        nodes = topology.nodes
        return [nodes[number * len(nodes) // num_processes] for number in range(num_processes)]
    place = {cpu: node for node, cpus in enumerate(topology.nodes) for cpu in cpus}
    cores = sorted(topology.cores, key=lambda core: (place.get(core[0], len(place)), core))
    if num_processes >= len(cores):
        return [cores[number % len(cores)] for number in range(num_processes)]
    bounds = [number * len(cores) // num_processes for number in range(num_processes + 1)]
    shares = (cores[first:stop] for first, stop in zip(bounds[:-1], bounds[1:], strict=True))
    return [tuple(sorted(cpu for core in share for cpu in core)) for share in shares]


def _kept(groups: Iterable[tuple[int, ...]], usable: set[int]) -> tuple[tuple[int, ...], ...]:
    found = (tuple(cpu for cpu in group if cpu in usable) for group in groups)
    return tuple(group for group in found if group)


def _listed(path: Path) -> tuple[int, ...]:
    """Returns the numbers of a list such as 0-3,8; () if there is no such file."""
    if not path.is_file():
        return ()
    ranges = [part.split("-") for part in path.read_text().strip().split(",") if part]
    return tuple(sorted(cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)))


def _number(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name))
