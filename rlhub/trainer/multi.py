"""Training with trainer.controller=multi: every rank runs the loop that one driver runs otherwise.

The text of the loop and of the step is the same; what differs is below it (`single_controller/replicated.py`) and around it: rank
0 has the run folder, and what depends on its files, on signals or on the clock is decided there and told to all.

Under torchrun, or another launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, this process is one of the ranks and
no Ray is started.  Otherwise it starts the ranks with Ray, makes one call to each, and waits.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil

from rlhub.checkpoint.store import CheckpointStore
from rlhub.config.rules.placement import MAIN, pools_of
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.errors import RunFolderError
from rlhub.single_controller import (
    CallObserver,
    ClassWithInitArgs,
    Dispatch,
    LaunchOptions,
    Worker,
    WorkerInfo,
    launch,
    register,
)
from rlhub.single_controller.world import ProcessPlace, World, current_world, joined, place_of
from rlhub.tracking.recorder import Recorder
from rlhub.tracking.run_folder import LOCK, RunFolder
from rlhub.tracking.tracker import GenerationRow, Metrics, Status
from rlhub.trainer.ppo.trainer import build_data, build_trainer
from rlhub.trainer.run import Run
from rlhub.trainer.training import train
from rlhub.utils import faults

logger = logging.getLogger(__name__)

LOOP = "loop"
RESUMED: dict[str, Literal["auto"]] = {"disable": "auto"}
"""The resume_mode of the ranks, where another is carried out before they start."""
LOOK_S = 1.0


def train_everywhere(config: PPOConfig) -> int:
    """Trains in every rank, of which this process may be one, and returns the exit status."""
    place = place_of(os.environ)
    if place is None:
        return launch_ranks(config)
    if place.rank > 0:
        logging.getLogger().setLevel(logging.WARNING)  # all ranks write to one terminal
    return train_here(config, place)


def train_here(config: PPOConfig, place: ProcessPlace) -> int:
    """Trains as one of the ranks."""
    with joined(place, config.trainer.deadline_s.start):
        return train(config, build_data(config), build_trainer, SharedRun)


def launch_ranks(config: PPOConfig, observers: Sequence[CallObserver] = ()) -> int:
    """Starts every rank with Ray, makes one call to each, waits, and returns the exit status of rank 0.

    Raises the typed error of the rank that failed, when all have been ended.  A stop signal is passed on to rank 0.
    """
    trainer, logs = config.trainer, folder_of_logs(config.trainer)
    pools = pools_of(trainer)
    names = [MAIN, *sorted(pools.keys() - {MAIN})]
    starts = dict(zip(names, accumulate((pools[name].ranks for name in names), initial=0), strict=False))
    size = sum(pool.ranks for pool in pools.values())
    config = replace(config, trainer=replace(trainer, resume_mode=RESUMED.get(trainer.resume_mode, trainer.resume_mode)))
    options = LaunchOptions(
        nnodes=trainer.nnodes,
        ranks_per_node=pools[MAIN].n_gpus_per_node,
        pools={name: [pools[name].n_gpus_per_node] * pools[name].nnodes for name in names[1:]},
        placement={role_on(name): name for name in names[1:]},
        device="cuda" if trainer.device == "cuda" else "cpu",
        ray_init=trainer.ray_init,
        deadline_s=replace(trainer.deadline_s, update=math.inf),  # of the whole run; each rank minds those of its own calls
        log_dir=logs,
        plugins=trainer.plugins,
        observers=observers,
    )
    roles = {
        LOOP if name == MAIN else f"{LOOP}-{name}": ClassWithInitArgs(LoopWorker, config, starts[name], size) for name in names
    }
    with launch(roles, options) as launched:
        main = launched.groups[LOOP]
        address = main.address()
        with passed_on(main.workers[0]), shown(Path(main.workers[0].log)):
            statuses = [running.get() for running in [group.train.submit(*address) for group in launched.groups.values()]]
    return int(statuses[0][0])


def role_on(pool: str) -> str:
    """Returns the role of the ranks of a pool that run the loop, for logs and errors."""
    return LOOP if pool == MAIN else f"{LOOP}-{pool}"


def folder_of_logs(trainer: TrainerConfig) -> Path:
    """Returns the folder of the ranks' logs in the run folder, which is rank 0's to open.  Raises RunFolderError."""
    folder = RunFolder(Path(trainer.default_local_dir))
    if trainer.resume_mode == "disable":  # before there are logs, which would be moved too
        with folder:
            if aside := folder.set_aside():
                logger.warning("trainer.resume_mode=disable: the earlier run here was moved to %s", aside)
    elif problem := folder.problem():
        raise RunFolderError(f"trainer.default_local_dir: {problem}")
    folder.logs.mkdir(parents=True, exist_ok=True)
    (folder.path / LOCK).touch()  # marks the folder as a run's
    return folder.logs


@contextmanager
def passed_on(worker: WorkerInfo) -> Iterator[None]:
    """Passes the first stop signal on to the process of rank 0, after which the run saves and stops; a second Ctrl-C stops at
    once."""
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        if worker.node not in {address.address for found in psutil.net_if_addrs().values() for address in found}:
            logger.warning("rank 0 is on %s: send process %d there SIGTERM to save and stop", worker.node, worker.pid)
        else:
            os.kill(worker.pid, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def shown(log: Path) -> Iterator[None]:
    """Copies the log of rank 0, which has the console's lines, to standard error as it grows."""
    over = threading.Event()

    def copy() -> None:
        with log.open(errors="replace") as stream:
            stream.seek(0, os.SEEK_END)
            while not over.wait(LOOK_S):
                sys.stderr.write(stream.read())
            sys.stderr.write(stream.read())

    thread = threading.Thread(target=copy, name="log-of-rank-0", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class LoopWorker(Worker):
    """A rank that runs the training loop.  start: the ranks of the pools before its own; size: those of all."""

    def __init__(self, config: PPOConfig, start: int, size: int) -> None:
        self.config, self.start, self.size = config, start, size

    @register(dispatch_mode=Dispatch.RANK_ZERO, deadline="start")
    def address(self) -> tuple[str, int]:
        """Returns where the ranks of all pools meet."""
        return self.context.node, self.context.master_port

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, address: str, port: int) -> int:
        """Trains to the end, and returns the exit status."""
        place = ProcessPlace(
            rank=self.start + self.rank,
            size=self.size,
            local_rank=self.local_rank,
            local_size=self.context.local_world_size,
            node=self.context.node,
            address=address,
            port=port,
        )
        return train_here(self.config, place)


class SharedRun(Run):
    """The run on one of the ranks: rank 0 reads and writes the run folder, and the others follow it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        world = current_world()
        assert world is not None, "it is made inside `joined`"
        self.world = world
        self.store = SharedStore(self.folder.path, world)

    def __enter__(self) -> Run:
        self.checkpoint = self.world.first(lambda: super(SharedRun, self).__enter__().checkpoint, "run.open")
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
