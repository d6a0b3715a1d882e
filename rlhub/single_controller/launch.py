"""`launch` and `start_async_actor`: the one way a run gets its workers and actors, whatever the backend."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol, Self

from rlhub.errors import ConfigError
from rlhub.single_controller.async_actor import AsyncActor
from rlhub.single_controller.local import LocalAsyncActor, launch_local
from rlhub.single_controller.resources import AsyncActorOptions, Backend, LaunchOptions
from rlhub.single_controller.worker import ClassWithInitArgs
from rlhub.single_controller.worker_group import WorkerGroup


class StartedRun(Protocol):
    """What a backend's launch returns."""

    groups: dict[str, WorkerGroup]

    def close(self, deadline_s: float) -> None: ...


class Launched:
    """The worker groups of a run by role.  A context manager; `close` ends all processes and may be called twice."""

    def __init__(self, run: StartedRun, shutdown_deadline_s: float) -> None:
        self._run: StartedRun | None = run
        self._shutdown_deadline_s = shutdown_deadline_s
        self.groups = run.groups

    def close(self) -> None:
        """Ends every process of the run within the shutdown deadline, also when some are dead or hung."""
        run, self._run = self._run, None
        if run is not None:
            run.close(self._shutdown_deadline_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def launch(roles: Mapping[str, ClassWithInitArgs], options: LaunchOptions | None = None) -> Launched:
    """Starts one process per rank that hosts every role (nnodes x ranks_per_node ranks), and returns the groups.

    Raises ResourceError, DeadlineError, WorkerError (a role's constructor failed), ConfigError.  On any error nothing that
    was started is left behind.
    """
    options = options or LaunchOptions()
    run: StartedRun
    if options.backend == "local":
        run = launch_local(roles, options)
    elif options.backend == "ray":
        from rlhub.single_controller.ray.group import launch_ray  # here, for the local backend must not need Ray

        run = launch_ray(roles, options)
    else:
        raise _unknown(options.backend)
    for group in run.groups.values():
        group.deadline_s = options.deadline_s
    return Launched(run, options.deadline_s.shutdown)


def start_async_actor(spec: ClassWithInitArgs, options: AsyncActorOptions, *, backend: Backend = "ray") -> AsyncActor:
    """Starts it and waits until its object is built.  Under Ray the cluster must be connected.

    Raises WorkerError (the constructor failed), WorkerDiedError, DeadlineError, ResourceError (no cluster), ConfigError.
    On any error nothing that was started is left behind.
    """
    if backend == "local":
        return LocalAsyncActor(spec, options)
    if backend == "ray":
        from rlhub.single_controller.ray.async_actor import start_ray_actor

        return start_ray_actor(spec, options)
    raise _unknown(backend)


async def astart_async_actor(spec: ClassWithInitArgs, options: AsyncActorOptions, *, backend: Backend = "ray") -> AsyncActor:
    """`start_async_actor` for an event loop; several may start at the same time."""
    return await asyncio.to_thread(start_async_actor, spec, options, backend=backend)


def _unknown(backend: str) -> ConfigError:
    return ConfigError(f"no backend {backend!r}; known: ray, local")
