"""RolloutService: the replicas, the router and the weights folder of a run, for the driver's threads.

    service = RolloutService(config.actor_rollout_ref, runtime, service_options(...), loop=runner.loop)
    service.start()
    actor.write_weights(str(service.folder), version)      # training ranks, while generation goes on
    service.publish(str(service.folder), version)          # each replica pauses only for its own copy
    ... await service.router.agenerate(request, params)    # on `service.loop`

All methods may be called from any thread other than the loop's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlhub.config.rules.asynchronous import replica_places
from rlhub.config.sections.ppo import ActorRolloutRefConfig
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.engines.rollout.registry import most_replicas
from rlhub.errors import ResourceError
from rlhub.rollout_service.elastic import ReplicaBounds
from rlhub.rollout_service.fleet import FleetLimits
from rlhub.rollout_service.replica_control import ReplicaControl, number_of
from rlhub.rollout_service.router import Router
from rlhub.rollout_service.server import RolloutServer, UpdateReport
from rlhub.rollout_service.weights_folder import files_bytes, open_weights_folder
from rlhub.sharding_manager.files import WeightsFolder
from rlhub.sharding_manager.mirror import COLLECTIVE
from rlhub.single_controller import AsyncActor, AsyncActorOptions, CallObserver, ClassWithInitArgs, astart_async_actor
from rlhub.single_controller.placement import DevicePlace, ReplicaPlaces, is_one_machine
from rlhub.single_controller.resources import Backend
from rlhub.tracking.spans import RecordSpan, ignore_span
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.workers.memory_handover import WorkerRuntime

if TYPE_CHECKING:
    from rlhub.single_controller.ray.cluster import Connection

logger = logging.getLogger(__name__)

UNLIMITED = 1 << 20
"""Maximum number of concurrent calls in a replica: the engine limits its own batch, and `status` must never wait behind
requests."""
CLOSE_FACTOR = 3.0  # of the shutdown deadline, which each of several steps may use up


@dataclass(slots=True, kw_only=True)
class ServiceOptions:
    """The layout and the limits of a run's rollout service.

    counts: the number of places for replicas on each machine.  bounds: of the number of replicas; the service starts with the
    smallest one where the number follows the queue, else with one in every place.

    actor_places: the devices of the actor's ranks, where replicas share its GPUs.  generate_s: maximum wait for one completion.
    run_folder: for weights that cannot be published through memory.  own_weights: replicas load the model's files and serve at
    once, before any publication.  ray_init: used if no Ray cluster is connected yet.  observers: learn what the replicas' calls
    carry.  record: called with the span of each change of the number.
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
    observers: Sequence[CallObserver] = ()
    bounds: ReplicaBounds = field(default_factory=ReplicaBounds)
    record: RecordSpan = ignore_span

    @property
    def num_replicas(self) -> int:
        """Returns the number of replicas at the start."""
        return self.bounds.least if self.bounds.by_queue else sum(self.counts)


def service_options(
    config: ActorRolloutRefConfig,
    trainer: TrainerConfig,
    *,
    run_folder: Path,
    actor_places: Sequence[DevicePlace] = (),
    observers: Sequence[CallObserver] = (),
    record: RecordSpan = ignore_span,
) -> ServiceOptions:
    """Returns the options of the run's configuration: one replica per rank of the rollout's pool (the actor's pool, if the
    rollout has none), or with tensor parallelism one replica per tensor_model_parallel_size ranks; with min_replicas or
    max_replicas as many as the queue of requests calls for.

    actor_places: the devices of the actor's ranks (`actor.device_places()`), where the rollout shares its GPUs.
    """
    seconds, rollout = trainer.deadline_s, config.rollout
    limits_given = rollout.min_replicas is not None or rollout.max_replicas is not None
    most = [number for number in (most_replicas(rollout), rollout.max_replicas) if number is not None]
    counts = _counts(replica_places(config, trainer), min(most, default=None))
    least = (rollout.min_replicas or 1) if limits_given else 1
    bounds = ReplicaBounds(least=min(least, sum(counts)), most=sum(counts), by_queue=limits_given)
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
        counts=counts,
        actor_places=actor_places,
        limits=limits,
        generate_s=seconds.generate,
        resources_s=seconds.resources,
        cluster_s=seconds.cluster,
        log_dir=str((run_folder / "logs").absolute()),
        plugins=tuple(trainer.plugins),
        run_folder=run_folder,
        ray_init=trainer.ray_init,
        observers=observers,
        bounds=bounds,
        record=record,
    )


class RolloutService:
    """Starts and closes the service of a run.  It is a context manager; `close` leaves neither a process nor a folder in memory.

    loop: the event loop of the router, which runs in another thread; None for a loop of the service's own.
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
            one_by_one=options.bounds.by_queue,
        )
        self.control = ReplicaControl(
            self.router, options.bounds, places=config.rollout.most_sequences, record=options.record, freed=self._places.free
        )
        self._connection: Connection | None = None
        self._weights: WeightsFolder | None = None
        self._closed = False

    @property
    def folder(self) -> Path:
        """Returns the folder in which the trainer writes its weights."""
        assert self._weights is not None, "start first"
        return self._weights.path

    @property
    def written_to(self) -> str:
        """Returns what the training ranks' write_weights takes: the folder, or the name for folders of their own."""
        return COLLECTIVE if self._config.rollout.weights == COLLECTIVE else str(self.folder)

    @property
    def full_every(self) -> int:
        """Returns after how many versions the trainer writes a whole one; see WeightWriter."""
        in_memory = self._weights is not None and self._weights.in_memory
        return 1 if in_memory else self._config.rollout.weights_full_every

    def start(self) -> None:
        """Starts all replicas, which serve once weights are published.  After an error nothing is left running."""
        try:
            if self.options.backend == "ray":
                self._prepare_cluster()
            if self._config.rollout.weights != COLLECTIVE:
                self._weights = open_weights_folder(
                    self._config.rollout,
                    one_machine=self.options.backend == "local" or is_one_machine(),
                    run_folder=self.options.run_folder,
                    model_bytes=files_bytes(self._config.model.path),
                )
            self._run(self.control.start(self.options.num_replicas))
        except BaseException:
            self.close()
            raise

    def _prepare_cluster(self) -> None:
        from rlhub.single_controller.ray.cluster import connect

        options = self.options
        self._connection = connect(
            options.ray_init,
            device=options.device,
            num_ranks=sum(options.counts),
            deadline_s=options.resources_s,
            lost_after_s=options.cluster_s,
        )
        self._places.reserve()

    async def _start_replica(self, name: str) -> AsyncActor:
        common = AsyncActorOptions(
            name=name,
            device=self.options.device,
            worker_env=self.options.worker_env,
            log_dir=self.options.log_dir,
            plugins=self.options.plugins,
            max_concurrency=UNLIMITED,
            start_deadline_s=self.options.limits.start_s,
            observers=self.options.observers,
        )
        number = number_of(name)
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
        """Loads the weights `version`, which must be written, into all replicas; returns (replica, its report).  See
        Fleet.update."""
        reports: list[tuple[str, UpdateReport]] = self._run(self.router.update(folder, version))
        return reports

    def add(self, reason: str = "the driver asked for it") -> str:
        """Starts one more replica, and returns its name when it serves, with the newest weights.

        Raises ResourceError where there are as many as may be, and the error of the start.
        """
        return str(self._run(self.control.add(reason)))

    def remove(self, name: str, reason: str = "the driver asked for it") -> None:
        """Removes a replica once its requests have completed.  Raises RequestError for an unknown name, and ResourceError where
        the replica cannot be spared."""
        self._run(self.control.remove(name, reason))

    def restart(self, name: str) -> None:
        """Replaces a replica by a new one."""
        self._run(self.router.restart(name))

    def sleep(self) -> None:
        """Frees the memory of all replicas, whose requests complete before, until weights are published: for the actor on the
        same devices.  Requests wait meanwhile."""
        self._run(self.router.fleet.sleep(keep_weights=self.full_every > 1))

    def pause(self) -> None:
        """Stops sampling in all replicas until `resume`."""
        self._run(self.router.pause())

    def resume(self) -> None:
        """Continues sampling after `pause`."""
        self._run(self.router.resume())

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of ReplicaControl.metrics."""

        async def read() -> dict[str, float]:
            return self.control.metrics()

        return dict(self._run(read()))

    def close(self) -> None:
        """Ends the replicas and releases devices and memory.  Running requests fail.  Idempotent."""
        if self._closed:
            return
        self._closed = True
        seconds = CLOSE_FACTOR * self.options.limits.shutdown_s
        try:
            asyncio.run_coroutine_threadsafe(self.control.close(), self.loop).result(seconds)
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
        """Runs a coroutine on the loop and waits for it in the calling thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _counts(places: Sequence[int], most: int | None) -> list[int]:
    """Returns the number of replicas on each machine, at most `most` in total."""
    left, counts = sum(places) if most is None else most, []
    for number in places:
        counts.append(min(number, left))
        left -= counts[-1]
    return [count for count in counts if count]
