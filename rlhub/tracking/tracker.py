"""Tracker: the interface of all trackers, and the types that they share.

A tracker of your own is one class in one file, registered with `TRACKERS.register("name")` in a module named in
trainer.plugins, and chosen with trainer.logger='["console","name"]'.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhub.errors import ConfigError

Metrics = Mapping[str, float | int | str]
Status = Literal["running", "finished", "interrupted", "failed"]

TRACKERS_FOLDER = "trackers"
SHOWN_SAMPLES = 8
"""Number of a step's samples that a text shows; all of them are in generations/."""


@dataclass(slots=True, kw_only=True)
class RunInfo:
    """Describes a run before its first step.

    folder: the run folder.  config: the resolved configuration as plain nested dicts, without secrets for trackers.
    total_steps: the last step's number, None when unknown.  resumed_step: the last finished step of the checkpoint from which the
    run resumes; None for a new run.
    """

    project: str
    experiment: str
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    total_steps: int | None = None
    resumed_step: int | None = None

    def own_folder(self, tracker: str) -> Path:
        """Returns the folder for a tracker's files of this run: <run folder>/trackers/<name>."""
        return self.folder / TRACKERS_FOLDER / tracker


@dataclass(slots=True, kw_only=True)
class GenerationRow:
    """A sampled completion for people to read.

    score: the reward function's score; None when it failed.  finish_reason: stop, length or abort.  extra: JSON-able values.
    """

    prompt: str
    response: str
    score: float | None = None
    ground_truth: str = ""
    data_source: str = ""
    finish_reason: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


SAMPLE_COLUMNS = ("prompt", "response", "score", "ground_truth", "data_source", "finish_reason")


def sample_table(step: int, rows: Sequence[GenerationRow]) -> tuple[list[str], list[list[Any]]]:
    """Returns the columns' names and the cells of a step's samples, for trackers that show tables."""
    return ["step", *SAMPLE_COLUMNS], [[step, *(getattr(row, name) for name in SAMPLE_COLUMNS)] for row in rows]


def sample_text(rows: Sequence[GenerationRow]) -> str:
    """Returns the first samples as Markdown, for trackers that show texts."""
    parts = [f"**{row.prompt}**\n\n{row.response}\n\nscore: {row.score}" for row in rows[:SHOWN_SAMPLES]]
    return "\n\n---\n\n".join(parts)


def is_installed(package: str) -> bool:
    """Returns True where a package can be imported; a folder of that name without code, which a tracker left, is no package."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def load_package(name: str) -> Any:
    """Imports the package of a tracker's name.  Raises ConfigError with the command that installs it."""
    if not is_installed(name):
        raise ConfigError(f"trainer.logger names {name}, which is not installed; run: pip install 'rlhub[{name}]'")
    return importlib.import_module(name)


def one_line(error: Exception) -> str:
    """Returns an error's text on one line, without its full stop."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


class Tracker(ABC):
    """Follows a run from the driver process.  Its methods are called in order and block the training loop, so they must be quick.

    `start` is called once and first; it raises ConfigError when the tracker cannot work (package or login missing), so that a run
    does not begin without a tracker that its user chose.  `finish` is called once and last.  Between them a failure is raised as
    OSError or RlhubError: the recorder then warns and drops this tracker, and training continues.
    """

    @abstractmethod
    def start(self, run: RunInfo) -> None:
        """Opens the run, or continues it where run.resumed_step is set."""

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """Receives all metrics of one step, once per step, steps ascending."""

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:  # noqa: B027 - optional
        """Receives sample completions of a step; split is "val" or "train"."""

    def phase(self, name: str) -> None:  # noqa: B027 - optional
        """Receives the name of the run's present phase (generate, update_actor, ...)."""

    @abstractmethod
    def finish(self, status: Status, message: str = "") -> None:
        """Closes the run.  message: the reason of a failure."""
