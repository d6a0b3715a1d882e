"""Launches the workers of a job with their placement, deadlines, logs and plugins, in the same way for every trainer."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import zip_longest

from rlhub.config.rules.placement import MAIN, pool_name, pools_of
from rlhub.config.sections.trainer import TrainerConfig
from rlhub.single_controller import ClassWithInitArgs, Launched, LaunchOptions, WorkerGroup, launch, wait_all
from rlhub.trainer.run import Run

logger = logging.getLogger(__name__)

WHERE = {"local": "in this process", "ray": "with Ray, {}", "replicated": "in every process, {}"}
"""The way in which workers are started, for the log, by backend."""


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
