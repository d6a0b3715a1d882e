"""GPU memory that the roles of one process take in turns: who trains asks those who generate there to give up theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from weakref import WeakSet


class GivesRoom(ABC):
    """A worker that holds memory which it can do without until it is used again."""

    @abstractmethod
    def give_room(self) -> None:
        """Free it.  Idempotent."""


_holders: WeakSet[GivesRoom] = WeakSet()


def holds_memory(worker: GivesRoom) -> None:
    """From now on it is asked."""
    _holders.add(worker)


def make_room() -> None:
    """Before training computes in this process; every rank calls it, as the same roles are on all ranks of a pool."""
    for worker in list(_holders):
        worker.give_room()
