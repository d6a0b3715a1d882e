"""Launches the workers of a job with their placement, deadlines, logs and plugins, in the same way for every trainer.

With trainer.controller=multi every rank runs the training loop (`train_everywhere`).  Under torchrun, or another launcher that
sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, this process is one of the ranks and no Ray is started.  Otherwise it starts
them with Ray, makes one call to each, and waits.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, zip_longest
from pathlib import Path
from types import FrameType
from typing import Literal, TypeVar

import psutil

from rlhub.config.rules.placement import MAIN, pool_name, pools_of
from rlhub.config.sections.ppo import PPOConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.errors import RunFolderError
from rlhub.single_controller import (
    CallObserver,
    ClassWithInitArgs,
    Dispatch,
    Launched,
    LaunchOptions,
    Worker,
    WorkerGroup,
    WorkerInfo,
    launch,
    register,
    wait_all,
)
from rlhub.single_controller.world import ProcessPlace, joined, place_of
from rlhub.tracking.run_folder import LOCK, RunFolder
from rlhub.trainer.run import Run

logger = logging.getLogger(__name__)

WHERE = {"local": "in this process", "ray": "with Ray, {}", "replicated": "in every process, {}"}
"""The way in which workers are started, for the log, by backend."""
LOOP = "loop"
RESUMED: dict[str, Literal["auto"]] = {"disable": "auto"}
"""The resume_mode of the ranks, where another is carried out before they start."""
LOOK_S = 1.0
C = TypeVar("C", bound=PPOConfig)


def launch_workers(roles: Mapping[str, ClassWithInitArgs], config: TrainerConfig, *, run: Run | None = None) -> Launched:
    """Starts one process per rank of each pool, builds the models, and returns the worker groups.

    run: observes the calls and gives the folder for logs; None: the calls are not observed and nothing is logged to files.
    """
    pools = pools_of(config)
    placement = {role: pool_name(config, role) for role in roles if pool_name(config, role) != MAIN}
    ranks = config.nnodes * (config.n_gpus_per_node or 1)
    backend = "replicated" if config.controller == "multi" else config.backend
    where = WHERE[backend].format(f"{ranks} ranks on {config.device}")
    logger.info("starting %s, %s", ", ".join(roles), where)
    options = LaunchOptions(
        backend=backend,
        nnodes=config.nnodes,
        ranks_per_node=config.n_gpus_per_node or 1,
        pools={name: [pools[name].n_gpus_per_node] * pools[name].nnodes for name in placement.values()},
        placement=placement,
        device="cuda" if config.device == "cuda" else "cpu",
        ray_init=config.ray_init,
        deadline_s=config.deadline_s,
        log_dir=run.folder.logs if run is not None else None,
        plugins=config.plugins,
        observers=[run.calls] if run is not None else [],
    )
    launched = launch(roles, options)
    try:
        for groups in in_turn(launched.groups, placement):
            logger.info("building %s", " and ".join(group.role for group in groups))
            wait_all(group.init_model.submit() for group in groups)
    except BaseException:
        launched.close()
        raise
    return launched


def in_turn(groups: Mapping[str, WorkerGroup], placement: Mapping[str, str]) -> Iterator[list[WorkerGroup]]:
    """Yields one role of each pool at a time: roles of a pool share its processes, and different pools work in parallel."""
    by_pool: defaultdict[str, list[WorkerGroup]] = defaultdict(list)
    for role, group in groups.items():
        by_pool[placement.get(role, MAIN)].append(group)
    for turn in zip_longest(*by_pool.values()):
        yield [group for group in turn if group is not None]


def train_everywhere(config: C, train: Callable[[C], int]) -> int:
    """Trains in every rank, of which this process may be one, and returns the exit status of rank 0.

    train: is called with the configuration on every rank, inside `joined`.
    """
    place = place_of(os.environ)
    if place is None:
        return launch_ranks(config, train)
    if place.rank > 0:
        logging.getLogger().setLevel(logging.WARNING)  # all ranks write to one terminal
    with joined(place, config.trainer.deadline_s.start):
        return train(config)


def launch_ranks(config: C, train: Callable[[C], int], observers: Sequence[CallObserver] = ()) -> int:
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
        LOOP if name == MAIN else f"{LOOP}-{name}": ClassWithInitArgs(LoopWorker, config, train, (starts[name], size))
        for name in names
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
    """A rank that runs the training loop.  ranks: those of the pools before its own, and of all."""

    def __init__(self, config: C, train: Callable[[C], int], ranks: tuple[int, int]) -> None:
        self.work, self.deadline_s = partial(train, config), config.trainer.deadline_s.start
        self.start, self.size = ranks

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
        with joined(place, self.deadline_s):
            return self.work()
