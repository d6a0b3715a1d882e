"""`launch`: the one way a run gets its workers, whatever the backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from rlhub.errors import ConfigError
from rlhub.single_controller.observer import CallObserver
from rlhub.single_controller.worker import ClassWithInitArgs
from rlhub.single_controller.worker_group import WorkerGroup

MAIN_POOL = "main"
"""Where roles live that are not placed elsewhere."""


class _Run(Protocol):
    groups: dict[str, WorkerGroup]

    def close(self, deadline_s: float) -> None: ...


class Launched:
    """The worker groups of a run by role.  A context manager; `close` ends all processes and may be called twice."""

    def __init__(self, run: _Run, shutdown_deadline_s: float) -> None:
        self._run: _Run | None = run
        self._shutdown_deadline_s = shutdown_deadline_s
        self.groups = run.groups

    def close(self) -> None:
        """End every process of the run within the shutdown deadline, also when some are dead or hung."""
        run, self._run = self._run, None
        if run is not None:
            run.close(self._shutdown_deadline_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def launch(
    roles: Mapping[str, ClassWithInitArgs],
    *,
    backend: Literal["ray", "local"] = "ray",
    nnodes: int = 1,
    ranks_per_node: int = 1,
    device: Literal["cpu", "cuda"] = "cpu",
    ray_init: Mapping[str, Any] | None = None,
    start_deadline_s: float = 1800.0,
    resource_deadline_s: float = 120.0,
    cluster_deadline_s: float = 30.0,
    shutdown_deadline_s: float = 60.0,
    pools: Mapping[str, Sequence[int]] | None = None,
    placement: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
    plugins: Sequence[str] = (),
    worker_env: Mapping[str, str] | None = None,
    observers: Sequence[CallObserver] = (),
) -> Launched:
    """Start one process per rank that hosts every role (nnodes x ranks_per_node ranks), and return the groups.

    pools, placement: further pools by name with their ranks per node, and role -> pool for roles that live there.  Each pool
    has processes of its own, one per rank, and a rendezvous of its own; roles of one pool share its processes.
    ray_init: keywords of ray.init; an `address` (or the RAY_ADDRESS variable) joins a cluster, else one is started here.
    start_deadline_s: for building all workers; resource_deadline_s: for the cluster to answer, and to give the places;
    cluster_deadline_s: how long its head may be silent later, before calls raise ClusterLostError.
    log_dir: each worker's output goes to `<role>-rank<r>.log` there; None leaves it to the backend.
    plugins: modules that every worker imports before it is built.  worker_env: extra variables for the workers.
    Raises ResourceError, DeadlineError, WorkerError (a role's constructor failed), ConfigError.  On any error nothing that
    was started is left behind.
    """
    if backend == "local":
        from rlhub.single_controller.local import launch_local

        if placement:
            raise ConfigError(f"backend=local has no second pool for {', '.join(placement)}; use backend=ray")
        local = launch_local(
            roles, nnodes=nnodes, ranks_per_node=ranks_per_node, device=device, plugins=plugins, observers=observers
        )
        return Launched(local, shutdown_deadline_s)
    if backend != "ray":
        raise ConfigError(f"no backend {backend!r}; known: ray, local")
    from rlhub.single_controller.ray.launch import RayRunOptions, launch_ray

    options = RayRunOptions(
        pools={MAIN_POOL: [ranks_per_node] * nnodes} | {name: list(counts) for name, counts in (pools or {}).items()},
        placement=dict(placement or {}),
        device=device,
        ray_init=dict(ray_init or {}),
        start_deadline_s=start_deadline_s,
        resource_deadline_s=resource_deadline_s,
        cluster_deadline_s=cluster_deadline_s,
        log_dir=None if log_dir is None else str(Path(log_dir).absolute()),
        plugins=tuple(plugins),
        worker_env=dict(worker_env or {}),
        observers=tuple(observers),
    )
    return Launched(launch_ray(roles, options), shutdown_deadline_s)
