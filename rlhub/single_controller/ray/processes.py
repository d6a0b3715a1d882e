"""`RayProcesses`: the processes of a pool, one per rank, from creation to their end."""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhub.single_controller.calls import Deadline, WorkerInfo
from rlhub.single_controller.ray.pending import Gather
from rlhub.single_controller.ray.pool import RayResourcePool
from rlhub.single_controller.ray.process import (
    ProcessIdentity,
    ProcessSetup,
    WorkerProcess,
    rank_environment,
    start_environment,
    visible_devices,
)
from rlhub.single_controller.ray.reaper import end_on_nodes
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext, check_worker_env
from rlhub.utils import faults

logger = logging.getLogger(__name__)

_ORDERLY_SHARE = 0.25
"""Share of the shutdown deadline for workers to release things themselves; the rest is for ending them."""

_STARTING = "workers"
"""Role named in errors before a process has roles."""


@dataclass(slots=True, kw_only=True)
class ProcessOptions:
    """The options with which processes are started.

    name: names the processes' logs (`<name>-rank<r>.log` in log_dir) and, when detached, the actors (`<name>-<rank>`).
    worker_env: added to every process.  python_path: import path entries added in every process.
    start_deadline_s: from creation until all roles are built.  detached: the processes outlive the driver.
    """

    name: str = "worker"
    device: str = "cpu"
    worker_env: dict[str, str] = field(default_factory=dict)
    log_dir: str | None = None
    plugins: tuple[str, ...] = ()
    python_path: tuple[str, ...] = ()
    start_deadline_s: float = 1800.0
    detached: bool = False


class RayProcesses:
    """The processes of a pool.  The constructor requests them and returns at once; `start` waits until they run and makes them
    ranks.  On any error those that were started are ended."""

    def __init__(self, pool: RayResourcePool, options: ProcessOptions) -> None:
        check_worker_env(options.worker_env)
        self.pool = pool
        self.options = options
        self.failed = False
        self._marker = uuid.uuid4().hex
        self._deadline = time.monotonic() + options.start_deadline_s
        slots = pool.slots()
        self._workers = tuple(WorkerInfo(rank=rank, node=slot.node_ip, pid=0) for rank, slot in enumerate(slots))
        self._contexts: dict[int, WorkerContext] = {}
        self.actors = [self._create(rank) for rank in range(len(slots))]

    def start(self) -> None:
        """Waits for the processes and gives each its rank."""
        try:
            identities = self._on_all("start", lambda rank: self.actors[rank].identity.remote())
            self._contexts = self._place(identities)
            self._on_all("prepare", lambda rank: self.actors[rank].prepare.remote(self._setup(rank, identities)))
        except BaseException:
            self.failed = True
            self.close()
            raise

    @classmethod
    def attach(cls, actors: Sequence[Any], pool: RayResourcePool, options: ProcessOptions) -> RayProcesses:
        """Takes over processes that run already (detached ones of another driver)."""
        processes = cls.__new__(cls)
        processes.pool, processes.options, processes.failed, processes._marker = pool, options, False, ""
        processes._deadline = time.monotonic() + options.start_deadline_s
        processes.actors = list(actors)
        processes._workers = tuple(WorkerInfo(rank=rank, node="", pid=0) for rank in range(len(actors)))
        identities = processes._on_all("identity", lambda rank: processes.actors[rank].identity.remote())
        processes._workers = tuple(WorkerInfo(rank=r, node=i.node_ip, pid=i.pid) for r, i in sorted(identities.items()))
        return processes

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._workers

    def note_failure(self) -> None:
        """Records that a rank died or hangs: its peers may hang too, so closing will not wait for them."""
        self.failed = True

    def add_role(self, role: str, spec: ClassWithInitArgs) -> None:
        """Builds a role's worker on every rank.  Raises WorkerError when a constructor fails."""
        reference = ray.put(spec)
        contexts = {rank: _with_role(context, role) for rank, context in self._contexts.items()}
        self._on_all("__init__", lambda rank: self.actors[rank].add.remote(reference, contexts[rank]), role)

    def close(self, deadline_s: float = 60.0) -> None:
        """Ends all processes and what they started, first in an orderly way when nothing has failed."""
        if not ray.is_initialized() or not self.actors:
            return
        deadline = time.monotonic() + deadline_s
        if not self.failed:
            self._close_orderly(deadline_s * _ORDERLY_SHARE)
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        self.actors = []
        if self._marker:
            end_on_nodes(self._marker, {slot.node_id for slot in self.pool.slots()}, max(1.0, deadline - time.monotonic()))

    # -- starting ----------------------------------------------------------------------------------------------------------

    def _create(self, rank: int) -> Any:
        slot = self.pool.slots()[rank]
        naming = {"name": f"{self.options.name}-{rank}", "lifetime": "detached"} if self.options.detached else {}
        environment = start_environment(self.options.device, self.options.worker_env, self._marker)
        return (
            ray.remote(WorkerProcess)
            .options(
                max_restarts=0,
                max_concurrency=1,
                **self.pool.actor_resources(),
                **naming,
                runtime_env={"env_vars": environment},
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=slot.group,
                    placement_group_bundle_index=slot.bundle,
                    placement_group_capture_child_tasks=False,
                ),
            )
            .remote()
        )

    def _place(self, identities: Mapping[int, ProcessIdentity]) -> dict[int, WorkerContext]:
        """Returns the contexts by rank; from here on the workers' pids and logs are known."""
        self._workers = tuple(
            WorkerInfo(rank=rank, node=identity.node_ip, pid=identity.pid, log=self._log_file(rank))
            for rank, identity in sorted(identities.items())
        )
        local_ranks, local_sizes = self.pool.local_ranks(), self.pool.local_world_sizes()
        return {
            rank: WorkerContext(
                role=self.options.name,
                rank=rank,
                world_size=len(identities),
                local_rank=local_ranks[rank],
                local_world_size=local_sizes[rank],
                node=identity.node_ip,
                master_addr=identities[0].node_ip,
                master_port=identities[0].free_port,
                device=self.options.device,
            )
            for rank, identity in identities.items()
        }

    def _log_file(self, rank: int) -> str:
        return os.path.join(self.options.log_dir, f"{self.options.name}-rank{rank}.log") if self.options.log_dir else ""

    def _setup(self, rank: int, identities: Mapping[int, ProcessIdentity]) -> ProcessSetup:
        context = self._contexts[rank]
        first = rank - context.local_rank
        devices = visible_devices(identities, list(range(first, first + context.local_world_size)))
        return ProcessSetup(
            context=context,
            env=rank_environment(context, devices),
            python_path=self.options.python_path or tuple(entry or os.getcwd() for entry in sys.path),
            log_file=self._log_file(rank),
            log_level=logging.getLogger().getEffectiveLevel(),
            plugins=self.options.plugins,
            faults=faults.installed(),
        )

    def _on_all(self, what: str, start: Callable[[int], Any], role: str = _STARTING) -> dict[int, Any]:
        """Runs something on every rank within what is left of the start deadline."""
        references = {rank: start(rank) for rank in range(len(self.actors))}
        left = Deadline(seconds=max(0.1, self._deadline - time.monotonic()), setting="trainer.deadline_s.start")
        return Gather(role, what, references, dict(enumerate(self._workers)), left, self.note_failure).wait()

    # -- ending ------------------------------------------------------------------------------------------------------------

    def _close_orderly(self, seconds: float) -> None:
        references = [actor.close.remote() for actor in self.actors]
        done, late = ray.wait(references, num_returns=len(references), timeout=seconds)
        for reference in done:
            try:
                ray.get(reference)
            except RayError as error:
                logger.warning("a worker failed while closing: %s", str(error).strip().splitlines()[-1])
        if late:
            logger.warning("%d of %d workers did not close within %.0f s and are ended", len(late), len(references), seconds)


def _with_role(context: WorkerContext, role: str) -> WorkerContext:
    return replace(context, role=role)
