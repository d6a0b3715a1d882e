"""Launching a run's workers with its deadlines, logs and plugins: the same for every trainer."""

from __future__ import annotations

from collections.abc import Mapping

from rlhub.config.trainer import DeadlineConfig, TrainerConfig
from rlhub.single_controller import ClassWithInitArgs, Launched, launch
from rlhub.trainer.run import Run


def launch_workers(
    roles: Mapping[str, ClassWithInitArgs],
    config: TrainerConfig,
    *,
    deadlines: Mapping[str, Mapping[str, str]],
    run: Run | None = None,
) -> Launched:
    """Start one process per rank, set each method's deadline, and build the models.

    deadlines: per role, method -> field of trainer.deadline_s.  run: times and shows the calls, and has the log folder.
    """
    seconds: DeadlineConfig = config.deadline_s
    launched = launch(
        roles,
        backend=config.backend,
        nnodes=config.nnodes,
        ranks_per_node=config.n_gpus_per_node or 1,
        device="cuda" if config.device == "cuda" else "cpu",
        ray_init=config.ray_init,
        start_deadline_s=seconds.start,
        resource_deadline_s=seconds.resources,
        shutdown_deadline_s=seconds.shutdown,
        log_dir=run.folder.logs if run is not None else None,
        plugins=config.plugins,
        observers=[run.calls] if run is not None else [],
    )
    try:
        for role, group in launched.groups.items():
            group.set_deadlines({method: getattr(seconds, field) for method, field in deadlines[role].items()})
            group.init_model()
    except BaseException:
        launched.close()
        raise
    return launched
