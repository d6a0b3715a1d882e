"""WeightsElsewhere: what a rollout engine is whose weights live in worker processes of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any


class WeightsElsewhere(ABC):
    """Nobody in this process can write or read the weights; a class of the caller's does, in every worker."""

    @abstractmethod
    def call_workers(self, target: str, method: str, *arguments: Any) -> Sequence[Any]:
        """In every worker call a method of its one object of the class `target` ("module:Class", built from what WeightReader
        takes for an engine); the answers, by rank.  Between two steps, which wait: it must return soon.  Arguments and answers
        are pickled; an RlhubError of a worker is raised here.
        """

    @abstractmethod
    def overwriting(self, version: int) -> AbstractContextManager[None]:
        """As RolloutEngine's; the workers write the weights."""
