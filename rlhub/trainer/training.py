"""A training job from data to exit status: the same for every trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

from rlhub.config.schema import to_dict
from rlhub.config.trainer import TrainerConfig
from rlhub.trainer.run import Run

logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """Trains to the end, or to a stop signal; returns the last step taken."""

    def fit(self) -> int: ...


class TrainingData(Protocol):
    """The driver's data; total_steps follows from it and the configuration."""

    total_steps: int


class TrainingConfig(Protocol):
    """A configuration with the section that every trainer has."""

    trainer: TrainerConfig


C = TypeVar("C", bound=TrainingConfig)
D = TypeVar("D", bound=TrainingData)


def train(config: C, data: D, build: Callable[[C, D, Run, ExitStack], Trainer]) -> int:
    """Open the run, build the trainer, fit; returns the exit status (128 + signal when stopped by one).

    A run that is finished already starts no process and says what to do.
    """
    resolved: dict[str, Any] = to_dict(config)
    with ExitStack() as stack:
        run = stack.enter_context(Run(config.trainer, resolved, data.total_steps))
        if run.already_finished:
            logger.warning(run.already_finished)
            return 0
        trainer = build(config, data, run, stack)
        run.start()
        last = trainer.fit()
        logger.info("step %d of %d done; run folder %s, report %s", last, data.total_steps, run.folder.path, run.folder.report)
        return run.signals.exit_code
