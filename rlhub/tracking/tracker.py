"""Tracker: anything that is told about a run while it goes on.  The vocabulary shared by all of them is here.

A tracker of your own is one class in one file, registered with `TRACKERS.register("name")` in a module named in
trainer.plugins, and chosen with trainer.logger='["console","name"]'.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Metrics = Mapping[str, float | int | str]
Status = Literal["running", "finished", "interrupted", "failed"]


@dataclass(slots=True, kw_only=True)
class RunInfo:
    """What is known of a run before its first step.

    folder: the run folder.  config: the resolved configuration as plain nested dicts; given to trackers with secrets
        hidden.  total_steps: the last step's number, None when unknown.
    resumed_step: the last finished step of the checkpoint this run continues from; None for a run from the beginning.
    """

    project: str
    experiment: str
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    resumed_step: int | None = None


@dataclass(slots=True, kw_only=True)
class GenerationRow:
    """One sampled completion, to be read by people.

    score: the reward function's; None when it failed.  finish_reason: stop, length or abort.
    extra: anything JSON has a form for.
    """

    prompt: str
    response: str
    score: float | None = None
    ground_truth: str = ""
    data_source: str = ""
    finish_reason: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


class Tracker(ABC):
    """Lives in the driver process; its methods are called in order and block the training loop, so they must be quick.

    `start` comes first and once; it raises ConfigError when the tracker cannot work (package or login missing), so a run
    does not begin without what its user asked for.  `finish` comes last and once.  Between them a failure is raised as
    OSError or RlhubError: the recorder then warns, drops this tracker, and training goes on.
    """

    @abstractmethod
    def start(self, run: RunInfo) -> None: ...

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """All metrics of one step, once per step, steps ascending."""

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:  # noqa: B027 - optional
        """Sample completions of a step; split is "val" or "train"."""

    def phase(self, name: str) -> None:  # noqa: B027 - optional
        """The run is now doing `name` (generate, update_actor, ...)."""

    @abstractmethod
    def finish(self, status: Status, message: str = "") -> None: ...
