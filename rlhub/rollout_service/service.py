"""RolloutService: replicas, router and weights folder of a run, as the driver's threads see them.

    service = RolloutService(config.actor_rollout_ref, runtime, service_options(...), loop=runner.loop)
    service.start()
    actor.write_weights(str(service.folder), version)      # training ranks, while generation goes on
    service.publish(str(service.folder), version)          # every replica pauses for its own copying only
    ... await service.router.agenerate(request, params)    # on `service.loop`

All methods may be called from any thread but the loop's own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlhub.config.rules.placement import pool_of
from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.engines.rollout.registry import most_replicas
from rlhub.errors import ResourceError
from rlhub.rollout_service.fleet import FleetLimits
from rlhub.rollout_service.router import Router
from rlhub.rollout_service.server import RolloutServer, UpdateReport
from rlhub.rollout_service.weights_folder import WeightsFolder, files_bytes, open_weights_folder
from rlhub.single_controller import AsyncActor, AsyncActorOptions, ClassWithInitArgs, astart_async_actor
from rlhub.single_controller.placement import DevicePlace, ReplicaPlaces, is_one_machine
from rlhub.single_controller.resources import Backend
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.workers.memory_handover import WorkerRuntime

if TYPE_CHECKING:
    from rlhub.single_controller.ray.cluster import Connection

logger = logging.getLogger(__name__)

UNLIMITED = 1 << 20
"""Calls at a time in a replica: the engine decides how many it works on, and `status` must never wait behind requests."""
CLOSE_FACTOR = 3.0  # of the shutdown deadline, which each of several steps may use up


@dataclass(slots=True, kw_only=True)
class ServiceOptions:
    """How the service of a run is laid out.

    counts: replicas on each machine.  actor_places: the actor's ranks, where replicas share their GPUs.  run_folder: for weights that
    cannot be published through memory.  generate_s: longest wait for one completion.  own_weights: replicas read the model's
    files and serve at once, without anything being published.  ray_init: where no cluster is connected yet.
    """

    backend: Backend = "ray"
    device: str = "cpu"
    counts: Sequence[int] = (1,)
    actor_places: Sequence[DevicePlace] = ()
    limits: FleetLimits = field(default_factory=FleetLimits)
    generate_s: float | None = None
    resources_s: float = 120.0
    cluster_s: float = 30.0
    log_dir: str | None = None
    plugins: tuple[str, ...] = ()
    worker_env: dict[str, str] = field(default_factory=dict)
    run_folder: Path = Path("outputs")
    own_weights: bool = False
    ray_init: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_replicas(self) -> int:
        return sum(self.counts)


def service_options(
    config: ActorRolloutRefConfig, trainer: TrainerConfig, *, run_folder: Path, actor_places: Sequence[DevicePlace] = ()
) -> ServiceOptions:
    """As the run's configuration says: one replica a rank of the rollout's pool (the actor's own, where it has none), or with
    tensor parallelism one for every so many ranks.

    actor_places: the actor's ranks (`actor.device_places()`), where the rollout shares their GPUs.
    """
    pool, seconds, each = pool_of(trainer, "rollout"), trainer.deadline_s, config.rollout.tensor_model_parallel_size
    limits = FleetLimits(
        restarts=config.rollout.replica_restarts,
        start_s=seconds.start,
        update_s=seconds.sync,
        shutdown_s=seconds.shutdown,
        drain_s=seconds.generate,
    )
    return ServiceOptions(
        backend=trainer.backend,
        device="cuda" if trainer.device == "cuda" else "cpu",
        counts=_counts([pool.n_gpus_per_node // each] * pool.nnodes, most_replicas(config.rollout)),
        actor_places=actor_places,
        limits=limits,
        generate_s=seconds.generate,
        resources_s=seconds.resources,
        cluster_s=seconds.cluster,
        log_dir=str((run_folder / "logs").absolute()),
        plugins=tuple(trainer.plugins),
        run_folder=run_folder,
        ray_init=trainer.ray_init,
    )


class RolloutService:
    """See the module docstring.  A context manager; `close` leaves no process and no folder in memory behind.

    loop: on which the router lives, running in another thread; None: one of the service's own.
    """

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        runtime: WorkerRuntime,
        options: ServiceOptions,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.options = options
        self._config, self._runtime, self._server = config, runtime, RolloutServer
        self._most = most_replicas(config.rollout)
        self._own_thread = LoopThread("rollout-service") if loop is None else None
        self.loop = loop or self._own_thread.loop  # type: ignore[union-attr]
        self.router = Router(self._start_replica, options.limits, generate_s=options.generate_s, own_weights=options.own_weights)
        self._places = ReplicaPlaces(
            device=options.device,
            counts=options.counts,
            actor_ranks=options.actor_places,
            deadline_s=options.resources_s,
            devices_each=config.rollout.tensor_model_parallel_size,
        )
        self._connection: Connection | None = None
        self._weights: WeightsFolder | None = None
        self._closed = False

    @property
    def folder(self) -> Path:
        """Where the trainer writes its weights."""
        assert self._weights is not None, "start first"
        return self._weights.path

    def start(self) -> None:
        """Start all replicas; they serve when weights have been published.  On any error nothing is left behind."""
        try:
            if self.options.backend == "ray":
                self._prepare_cluster()
            self._weights = open_weights_folder(
                self._config.rollout.weights_folder,
                one_machine=self.options.backend == "local" or is_one_machine(),
                run_folder=self.options.run_folder,
                model_bytes=files_bytes(self._config.model.path),
            )
            self._run(self._start_all())
        except BaseException:
            self.close()
            raise

    def _prepare_cluster(self) -> None:
        from rlhub.single_controller.ray.cluster import connect

        options = self.options
        self._connection = connect(
            options.ray_init,
            device=options.device,
            num_ranks=options.num_replicas,
            deadline_s=options.resources_s,
            lost_after_s=options.cluster_s,
        )
        self._places.reserve()

    async def _start_all(self) -> None:
        starts = [asyncio.create_task(self.router.add(_name(number))) for number in range(self.options.num_replicas)]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise

    async def _start_replica(self, name: str) -> AsyncActor:
        common = AsyncActorOptions(
            name=name,
            device=self.options.device,
            worker_env=self.options.worker_env,
            log_dir=self.options.log_dir,
            plugins=self.options.plugins,
            max_concurrency=UNLIMITED,
            start_deadline_s=self.options.limits.start_s,
        )
        number = int(name.rpartition("-")[2])
        if self._most is not None and number >= self._most:
            raise ResourceError(
                f"rollout.name={self._config.rollout.name} has servers for {self._most} replicas of the rollout service, so "
                f"replica {number} has none: add a server to its configuration"
            )
        if self.options.backend == "ray":
            common = await asyncio.to_thread(self._places.options, number, common)
        own = self.options.own_weights
        spec = ClassWithInitArgs(self._server, self._config, self._runtime, replica=number, load_checkpoint=own)
        return await astart_async_actor(spec, common, backend=self.options.backend)

    def publish(self, folder: str, version: int) -> list[tuple[str, UpdateReport]]:
        """Give all replicas the weights `version`, which are written; (replica, its report).  See Fleet.update."""
        reports: list[tuple[str, UpdateReport]] = self._run(self.router.update(folder, version))
        return reports

    def add(self) -> str:
        """Start one more replica; its name.  It serves as soon as it has the newest weights."""

        async def start() -> str:
            name = next(name for name in map(_name, itertools.count()) if not self.router.fleet.knows(name))
            await self.router.add(name)
            return name

        return str(self._run(start()))

    def remove(self, name: str) -> None:
        """Take a replica out when its requests are done."""
        self._run(self.router.remove(name))

    def restart(self, name: str) -> None:
        """Replace a replica by a fresh one."""
        self._run(self.router.restart(name))

    def pause(self) -> None:
        """Sample nothing until `resume`."""
        self._run(self.router.pause())

    def resume(self) -> None:
        """Go on after `pause`."""
        self._run(self.router.resume())

    def metrics(self) -> dict[str, float]:
        """See Router.metrics."""

        async def read() -> dict[str, float]:
            return self.router.metrics()

        return dict(self._run(read()))

    def close(self) -> None:
        """End the replicas, give devices and memory back.  Requests under way fail.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        seconds = CLOSE_FACTOR * self.options.limits.shutdown_s
        try:
            asyncio.run_coroutine_threadsafe(self.router.close(), self.loop).result(seconds)
        except TimeoutError:
            logger.warning("the rollout service did not close within %g s: something blocks its event loop", seconds)
        finally:
            self._places.release()
            if self._weights is not None:
                self._weights.close()
            if self._own_thread is not None:
                self._own_thread.stop()
            if self._connection is not None:
                self._connection.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """On the loop, from another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _counts(places: Sequence[int], most: int | None) -> list[int]:
    """Replicas on each machine, of which there are `most` in all."""
    left, counts = sum(places) if most is None else most, []
    for number in places:
        counts.append(min(number, left))
        left -= counts[-1]
    return [count for count in counts if count]


def _name(number: int) -> str:
    return f"rollout-{number}"
