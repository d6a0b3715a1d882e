"""`AsyncActor`: an object with `async def` methods that lives elsewhere, called from any event loop, many calls at once.

    actor = start_async_actor(ClassWithInitArgs(Server, config), AsyncActorOptions(name="rollout-0"), backend="ray")
    completion = await actor.call("agenerate", request, deadline_s=60.0)

Under Ray it has a process of its own; the local backend gives it a thread with its own event loop in this process.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rlhub.errors import ConfigError
from rlhub.single_controller.worker import ClassWithInitArgs

Backend = Literal["ray", "local"]


class AsyncActor(Protocol):
    """The caller's side."""

    name: str

    @property
    def ended(self) -> bool:
        """Whether it was killed or its process is known to have died: every call fails from now on."""
        ...

    async def call(self, method: str, *args: Any, deadline_s: float | None = None, **kw: Any) -> Any:
        """Run a method there and return its result.  From any event loop; calls run concurrently, in the order of sending.

        Cancelling the await cancels the method.  Raises WorkerError (the method raised; one of rlhub's own errors is its
        cause), WorkerDiedError (the process is gone), DeadlineError (not done after `deadline_s`; the method is cancelled).
        """
        ...

    async def until_ended(self) -> None:
        """Returns when it has ended, so that it can be replaced at once and not at the next call."""
        ...

    def kill(self) -> None:
        """End it and what it started, without waiting; calls under way raise WorkerDiedError.  May be called twice."""
        ...


@dataclass(slots=True, kw_only=True)
class AsyncActorOptions:
    """How an actor is started.  The local backend uses name, device, plugins and max_concurrency.

    name: its role in errors, and its log file (`<name>.log` in log_dir).
    num_cpus, num_gpus: what it takes of the cluster (of its slot, where it has one).
    devices: its CUDA_VISIBLE_DEVICES, to share GPUs that others have reserved; "" means those that Ray gave it.
    worker_env: added to its process.  plugins: modules imported before it is built.
    max_concurrency: calls that run at the same time; further ones wait there.
    start_deadline_s: from creation until the object is built.
    slot: a place of a RayResourcePool (`pool.slots()[rank]`) to live in.  node_id: else the node to live on.
    """

    name: str
    device: str = "cpu"
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    devices: str = ""
    worker_env: dict[str, str] = field(default_factory=dict)
    log_dir: str | None = None
    plugins: tuple[str, ...] = ()
    max_concurrency: int = 1024
    start_deadline_s: float = 1800.0
    slot: Any = None
    node_id: str = ""


def start_async_actor(spec: ClassWithInitArgs, options: AsyncActorOptions, *, backend: Backend = "ray") -> AsyncActor:
    """Start it and wait until its object is built.  Under Ray the cluster must be connected.

    Raises WorkerError (the constructor failed), WorkerDiedError, DeadlineError, ResourceError (no cluster), ConfigError.
    On any error nothing that was started is left behind.
    """
    if backend == "local":
        from rlhub.single_controller.local.async_actor import LocalAsyncActor

        return LocalAsyncActor(spec, options)
    if backend != "ray":
        raise ConfigError(f"no backend {backend!r}; known: ray, local")
    from rlhub.single_controller.ray.async_actor import start_ray_actor

    return start_ray_actor(spec, options)


async def astart_async_actor(spec: ClassWithInitArgs, options: AsyncActorOptions, *, backend: Backend = "ray") -> AsyncActor:
    """`start_async_actor` for an event loop; several may start at the same time."""
    return await asyncio.to_thread(start_async_actor, spec, options, backend=backend)
