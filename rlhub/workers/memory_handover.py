"""The agreements between roles: the facts of the run, the device memory that they use in turn, and the address where they meet.

Roles of one process take turns on its device: a role that trains asks those that generate there to release their memory.
Roles on separate pools meet at an address, over which the actor's weights travel to the rollout engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from weakref import WeakSet

import psutil
import torch

from rlhub.utils.ports import free_port

GIB = float(1 << 30)


@dataclass(slots=True, kw_only=True, frozen=True)
class WorkerRuntime:
    """The facts of a run that workers need besides their own section of the configuration.

    device: "cuda" or "cpu".  seed: the run's.  The lengths are limits in tokens; deadline_s bounds collectives.
    """

    device: str
    seed: int
    max_prompt_length: int
    max_response_length: int
    deadline_s: float = 1800.0

    def torch_device(self, local_rank: int) -> torch.device:
        """Returns this rank's device."""
        return torch.device("cuda", local_rank) if self.device == "cuda" else torch.device("cpu")


def memory_metrics(prefix: str, device: torch.device) -> dict[str, float]:
    """Returns the resident memory of this process and, on CUDA, the peak allocated since the last call, in GiB."""
    metrics = {f"memory/{prefix}_rss_gb": psutil.Process().memory_info().rss / GIB}
    if device.type == "cuda":
        metrics[f"memory/{prefix}_max_allocated_gb"] = torch.cuda.max_memory_allocated(device) / GIB
        torch.cuda.reset_peak_memory_stats(device)
    return metrics


class MemoryHolder(ABC):
    """A worker whose memory others may use while it is idle."""

    @abstractmethod
    def release_memory(self) -> None:
        """Frees what the worker can do without until its next use.  Idempotent."""


_holders: WeakSet[MemoryHolder] = WeakSet()


def register_memory_holder(worker: MemoryHolder) -> None:
    """Has the worker asked by every later `release_idle_memory` in this process, as long as it lives."""
    _holders.add(worker)


def release_idle_memory() -> None:
    """Has all holders in this process release their memory, before training computes.

    Every rank calls it, as the same roles are on all ranks of a pool.
    """
    for worker in list(_holders):
        worker.release_memory()


@dataclass(slots=True, kw_only=True, frozen=True)
class Rendezvous:
    """The place where the ranks of the actor and of a rollout on its own pool join to move weights.

    address, port: served by the actor's rank 0.  Ranks of the joint group: the senders first, then the receivers, each in
    the order of their own group.
    """

    address: str
    port: int
    num_senders: int
    num_receivers: int

    @property
    def size(self) -> int:
        return self.num_senders + self.num_receivers


def open_rendezvous(address: str, num_senders: int, num_receivers: int) -> Rendezvous:
    """Returns a rendezvous at this machine's `address`, on a port that was free a moment ago."""
    return Rendezvous(address=address, port=free_port(), num_senders=num_senders, num_receivers=num_receivers)
