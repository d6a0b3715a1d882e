"""An AsyncActor in a process of its own: an asyncio Ray actor that ends with the driver, also when the driver is killed."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
import uuid
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlhub.errors import ClusterLostError, ResourceError, WorkerDiedError
from rlhub.single_controller.async_actor import AsyncActorOptions
from rlhub.single_controller.observer import WorkerInfo
from rlhub.single_controller.ray.async_host import AsyncActorHost
from rlhub.single_controller.ray.exchange import Channel
from rlhub.single_controller.ray.pending import Gather, typed_error
from rlhub.single_controller.ray.process import HostIdentity, HostSetup, host_environment, start_environment
from rlhub.single_controller.ray.reaper import end_on_nodes
from rlhub.single_controller.ray.watch import check_cluster
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext, check_worker_env
from rlhub.utils import faults

logger = logging.getLogger(__name__)

_OWN_CALLS = 1000
"""Room in the actor for `deliver` and `collect` calls, which return at once or wait idly; the limit on the object's calls is
kept by the host."""

_REAP_S = 30.0


class RayAsyncActor:
    """See the module docstring; made by `start_ray_actor`."""

    def __init__(self, options: AsyncActorOptions) -> None:
        self.name = options.name
        self._options = options
        self._marker = uuid.uuid4().hex
        self._ended = False
        self._worker = WorkerInfo(rank=0, node="", pid=0)
        self._node_id = ""
        self._channels: dict[asyncio.AbstractEventLoop, Channel] = {}
        self._actor = _create(options, self._marker)

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def worker(self) -> WorkerInfo:
        """Where its process is."""
        return self._worker

    def start(self, spec: ClassWithInitArgs) -> None:
        """Wait for the process and build the object."""
        deadline = time.monotonic() + self._options.start_deadline_s
        try:
            identity: HostIdentity = self._wait("start", self._actor.identity.remote(), deadline)
            self._node_id = identity.node_id
            log = os.path.join(self._options.log_dir, f"{self.name}.log") if self._options.log_dir else ""
            self._worker = WorkerInfo(rank=0, node=identity.node_ip, pid=identity.pid, log=log)
            self._wait("prepare", self._actor.prepare.remote(self._setup(identity)), deadline)
            self._wait("__init__", self._actor.build.remote(spec), deadline)
        except BaseException:
            self.kill()
            raise

    async def call(self, method: str, *args: Any, deadline_s: float | None = None, **kw: Any) -> Any:
        if self._ended:
            raise self._death(method)
        return await self._channel().call(method, args, kw, deadline_s)

    async def until_ended(self) -> None:
        if not self._ended:
            try:
                await self._actor.linger.remote()
            except RayError as error:
                self._note_death(error)

    def kill(self) -> None:
        if not self._ended:
            self._ended = True
            if ray.is_initialized():
                ray.kill(self._actor, no_restart=True)
                # Not a daemon: what the process started is gone before this one ends.
                threading.Thread(target=self._reap, name=f"end-{self.name}").start()

    def _wait(self, what: str, reference: Any, deadline: float) -> Any:
        left = max(0.1, deadline - time.monotonic())
        return Gather(self.name, what, {0: reference}, {0: self._worker}, left, _nothing).wait()[0]

    def _setup(self, identity: HostIdentity) -> HostSetup:
        context = WorkerContext(
            role=self.name,
            node=identity.node_ip,
            master_addr=identity.node_ip,
            master_port=identity.free_port,
            device=self._options.device,
        )
        return HostSetup(
            context=context,
            env=host_environment(context, self._options.devices or ",".join(identity.gpu_ids)),
            python_path=tuple(entry or os.getcwd() for entry in sys.path),
            log_file=self._worker.log,
            log_level=logging.getLogger().getEffectiveLevel(),
            plugins=self._options.plugins,
            faults=faults.installed(),
        )

    def _channel(self) -> Channel:
        """The one of this event loop; those of loops that are closed are forgotten."""
        loop = asyncio.get_running_loop()
        if loop not in self._channels:
            for old in [other for other in self._channels if other.is_closed()]:
                self._channels.pop(old, None)
            self._channels[loop] = Channel(self._actor, self.name, uuid.uuid4().hex, self._explain)
        return self._channels[loop]

    def _explain(self, error: BaseException, method: str) -> BaseException:
        if isinstance(error, ClusterLostError):
            return error
        found = typed_error(error, self.name, self._worker, method)
        if isinstance(found, WorkerDiedError):
            self._note_death(error)
        return found

    def _note_death(self, error: BaseException) -> None:
        if not self._ended:
            logger.warning("%s (process %d) has died: %s", self.name, self._worker.pid, str(error).strip().splitlines()[0])
            self.kill()

    def _death(self, method: str) -> WorkerDiedError:
        return WorkerDiedError(
            f"process {self._worker.pid} was ended before it ran {method}", role=self.name, rank=0, node=self._worker.node
        )

    def _reap(self) -> None:
        try:
            end_on_nodes(self._marker, {self._node_id} - {""}, _REAP_S)
        except RayError as error:
            logger.warning("could not look for what %s left behind: %s", self.name, error)


def start_ray_actor(spec: ClassWithInitArgs, options: AsyncActorOptions) -> RayAsyncActor:
    """See `start_async_actor`."""
    check_worker_env(options.worker_env)
    check_cluster()
    if not ray.is_initialized():
        raise ResourceError(f"no Ray cluster for {options.name}: call `launch` or `rlhub.single_controller.ray.connect` first")
    actor = RayAsyncActor(options)
    actor.start(spec)
    return actor


def _create(options: AsyncActorOptions, marker: str) -> Any:
    placement: dict[str, Any] = {}
    if options.slot is not None:
        placement["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=options.slot.group,
            placement_group_bundle_index=options.slot.bundle,
            placement_group_capture_child_tasks=False,
        )
    elif options.node_id:
        placement["scheduling_strategy"] = NodeAffinitySchedulingStrategy(options.node_id, soft=False)
    return (
        ray.remote(AsyncActorHost)
        .options(
            max_restarts=0,
            max_concurrency=_OWN_CALLS,
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            runtime_env={"env_vars": start_environment(options.device, options.worker_env, marker)},
            **placement,
        )
        .remote(options.max_concurrency)
    )


def _nothing() -> None:
    """A failed start is cleaned up by `start`."""
