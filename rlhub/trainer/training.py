"""A training job from data to exit status: the same for every trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

from rlhub.checkpoint.store import Checkpoint
from rlhub.config.schema import to_dict
from rlhub.data.order import ResumableLoader
from rlhub.errors import ClusterLostError
from rlhub.trainer.preflight.model import check_models
from rlhub.trainer.resume import EXTRAS, MADE_WITH, TrainingConfig, changed_inputs, check_resume, made_with
from rlhub.trainer.run import Run

logger = logging.getLogger(__name__)


class Trainer(Protocol):
    """Trains to the end, or to a stop signal; returns the last step taken."""

    def fit(self) -> int: ...


class TrainingData(Protocol):
    """The driver's data; total_steps follows from it and the configuration."""

    @property
    def loader(self) -> ResumableLoader: ...

    @property
    def total_steps(self) -> int: ...


C = TypeVar("C", bound=TrainingConfig)
D = TypeVar("D", bound=TrainingData)


def train(config: C, data: D, build: Callable[[C, D, Run, ExitStack], Trainer]) -> int:
    """Open the run, build the trainer, fit; returns the exit status (128 + signal when stopped by one).

    A run that is finished already starts no process and says what to do; one that cannot go on from its checkpoint is an error
    before any is started.
    """

    def check(checkpoint: Checkpoint) -> None:
        check_resume(config, checkpoint)
        if checkpoint.step < data.total_steps:
            for text in changed_inputs(config, checkpoint, data.loader.extras_fingerprint):
                logger.warning(text)
            data.loader.load_state(checkpoint.state["loader"])  # raises where the position is one in other data

    resolved: dict[str, Any] = to_dict(config)
    record = {MADE_WITH: made_with(config), EXTRAS: data.loader.extras_fingerprint}
    with ExitStack() as stack:
        run = stack.enter_context(Run(config.trainer, resolved, data.total_steps, record=record, check=check))
        if run.already_finished:
            logger.warning(run.already_finished)
            return 0
        check_models(config)
        trainer = build(config, data, run, stack)
        run.start()
        try:
            last = trainer.fit()
        except ClusterLostError as error:
            run.finish("failed", str(error))  # at once: Ray ends this process a minute after its cluster was lost
            raise
        logger.info("step %d of %d done; run folder %s, report %s", last, data.total_steps, run.folder.path, run.folder.report)
        return run.signals.exit_code
