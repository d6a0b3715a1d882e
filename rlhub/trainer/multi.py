"""Training with trainer.controller=multi: every rank runs the loop that one driver runs otherwise.

The text of the loop and of the step is the same; what differs is below it (`single_controller/replicated.py`) and around it: rank
0 has the run folder, and what depends on its files, on signals or on the clock is decided there and told to all.

Under torchrun, or another launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, this process is one of the ranks and
no Ray is started.  Otherwise it starts the ranks with Ray, makes one call to each, and waits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhub.checkpoint.store import CheckpointStore
from rlhub.config.sections.ppo import PPOConfig
from rlhub.single_controller.world import Place, World, current_world, joined, place_of
from rlhub.tracking.recorder import Recorder
from rlhub.tracking.tracker import GenerationRow, Metrics, Status
from rlhub.trainer.ppo.trainer import build_data, build_trainer
from rlhub.trainer.run import Run
from rlhub.trainer.training import train
from rlhub.utils import faults

logger = logging.getLogger(__name__)


def train_everywhere(config: PPOConfig) -> int:
    """Trains in every rank, of which this process may be one, and returns the exit status."""
    place = place_of(os.environ)
    return launch_ranks(config) if place is None else train_here(config, place)


def train_here(config: PPOConfig, place: Place) -> int:
    """Trains as one of the ranks."""
    if place.rank > 0:
        logging.getLogger().setLevel(logging.WARNING)
    with joined(place, config.trainer.deadline_s.start):
        return train(config, build_data(config), build_trainer, ReplicatedRun)


class ReplicatedRun(Run):
    """The run on one of the ranks: rank 0 reads and writes the run folder, and the others follow it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        world = current_world()
        assert world is not None, "it is made inside `joined`"
        self.world = world
        self.store = SharedStore(self.folder.path, world)

    def __enter__(self) -> Run:
        self.checkpoint = self.world.first(lambda: super(ReplicatedRun, self).__enter__().checkpoint, "run.open")
        if self.world.rank > 0:
            self._plan_faults()
            faults.install(faults.installed(), rank=self.world.rank)
            self.signals.__enter__()
            if self.checkpoint is not None and self._check is not None:
                self._check(self.checkpoint)
        return self

    def start(self) -> None:
        if self.world.rank == 0:
            super().start()
        else:
            self.recorder = SilentRecorder(self.folder, self._info(), [])

    @property
    def stop_requested(self) -> bool:
        """True when a signal has asked any rank to stop; every rank asks at the same point."""
        received = [signal for signal in self.world.gather(self.signals.received, "run.stop") if signal is not None]
        self.signals.received = received[0] if received else None
        return bool(received)


class SharedStore(CheckpointStore):
    """The checkpoints as every rank uses them: rank 0 makes the folder, into which all write, and commits it."""

    def __init__(self, root: Path, world: World) -> None:
        super().__init__(root)
        self.world = world

    def begin(self, step: int) -> Path:
        return self.world.first(lambda: super(SharedStore, self).begin(step), "checkpoint.begin")

    def commit(self, *arguments: Any, **options: Any) -> Path:
        """Commits on rank 0; the others go on meanwhile."""
        return super().commit(*arguments, **options) if self.world.rank == 0 else self.folder(arguments[0])

    def retain(self, *arguments: Any, **options: Any) -> list[int]:
        return super().retain(*arguments, **options) if self.world.rank == 0 else []


class SilentRecorder(Recorder):
    """Records nothing: rank 0 does."""

    def log(self, step: int, metrics: Metrics) -> None:
        return

    def log_generations(self, step: int, split: str, rows: Sequence[GenerationRow]) -> None:
        return

    def phase(self, name: str) -> None:
        return

    def finish(self, status: Status, message: str = "", *, report: bool = True) -> None:
        return
