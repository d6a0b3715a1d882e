"""Launching a run's workers with their places, deadlines, logs and plugins: the same for every trainer."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import zip_longest

from rlhub.config.rules.placement import MAIN, pool_name, pools_of
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.single_controller import ClassWithInitArgs, Launched, WorkerGroup, launch, wait_all
from rlhub.trainer.run import Run

logger = logging.getLogger(__name__)

DEADLINES = {
    "init_model": "start",
    "generate_sequences": "generate",
    "generate_judgements": "generate",
    "compute_log_prob": "infer",
    "compute_ref_log_prob": "infer",
    "compute_values": "infer",
    "compute_rm_score": "infer",
    "evaluate": "infer",
    "update_actor": "update",
    "update_critic": "update",
    "train_step": "update",
    "open_transfer": "sync",
    "join_transfer": "sync",
    "sync_weights": "sync",
    "write_weights": "sync",
    "device_places": "sync",
    "save_checkpoint": "checkpoint",
    "load_checkpoint": "checkpoint",
}
"""Method -> field of trainer.deadline_s, for the methods of all workers."""


def launch_workers(roles: Mapping[str, ClassWithInitArgs], config: TrainerConfig, *, run: Run | None = None) -> Launched:
    """Start one process per rank of each pool, set each method's deadline, and build the models.

    run: times and shows the calls, and has the log folder.
    """
    seconds, pools = config.deadline_s, pools_of(config)
    placement = {role: pool_name(config, role) for role in roles if pool_name(config, role) != MAIN}
    ranks = config.nnodes * (config.n_gpus_per_node or 1)
    where = "in this process" if config.backend == "local" else f"with Ray, {ranks} ranks on {config.device}"
    logger.info("starting %s, %s", ", ".join(roles), where)
    launched = launch(
        roles,
        backend=config.backend,
        nnodes=config.nnodes,
        ranks_per_node=config.n_gpus_per_node or 1,
        pools={name: [pools[name].n_gpus_per_node] * pools[name].nnodes for name in placement.values()},
        placement=placement,
        device="cuda" if config.device == "cuda" else "cpu",
        ray_init=config.ray_init,
        start_deadline_s=seconds.start,
        resource_deadline_s=seconds.resources,
        cluster_deadline_s=seconds.cluster,
        shutdown_deadline_s=seconds.shutdown,
        log_dir=run.folder.logs if run is not None else None,
        plugins=config.plugins,
        observers=[run.calls] if run is not None else [],
    )
    try:
        for group in launched.groups.values():
            group.set_deadlines({name: getattr(seconds, DEADLINES[name]) for name in group.methods() if name in DEADLINES})
        for groups in in_turn(launched.groups, placement):
            logger.info("building %s", " and ".join(group.role for group in groups))
            wait_all(group.init_model.submit() for group in groups)
    except BaseException:
        launched.close()
        raise
    return launched


def in_turn(groups: Mapping[str, WorkerGroup], placement: Mapping[str, str]) -> Iterator[list[WorkerGroup]]:
    """One role of each pool at a time: roles of a pool share its processes, different pools work side by side."""
    by_pool: defaultdict[str, list[WorkerGroup]] = defaultdict(list)
    for role, group in groups.items():
        by_pool[placement.get(role, MAIN)].append(group)
    for turn in zip_longest(*by_pool.values()):
        yield [group for group in turn if group is not None]
