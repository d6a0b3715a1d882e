"""A program that each rank of a world runs, started as torchrun starts it: the checks of batches by reference, of which every
process runs its own share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rlhub.single_controller import ClassWithInitArgs, LaunchOptions, launch
from rlhub.single_controller.world import joined, place_of
from rlhub.utils.ports import free_port
from tests.support.row_workers import RowWorker

ROOT = Path(__file__).resolve().parents[2]
RANKS, POOLS = 2, {"one": [1], "two": [2]}


def start_ranks(size: int, *command: str, log: Path, **variables: str) -> list[subprocess.Popen[bytes]]:
    """Starts `python *command` on every rank, with the variables of torchrun; the output goes to `log`.<rank>."""
    port = str(free_port("127.0.0.1"))
    ranks = []
    for rank in range(size):
        place = {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        environment = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **variables}
        with Path(f"{log}.{rank}").open("wb") as output:
            ranks.append(subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=output, stderr=output))
    return ranks


def main() -> None:
    from tests.integration import test_row_references as through_ray
    from tests.support.row_calls import check_joined, check_life, check_refusals

    place = place_of(os.environ)
    assert place is not None
    roles = {role: ClassWithInitArgs(RowWorker) for role in ("rollout", "actor", "critic")}
    roles |= {role: ClassWithInitArgs(RowWorker, 2) for role in ("wide", "pair")}
    options = LaunchOptions(backend="replicated", ranks_per_node=RANKS, pools=POOLS, placement={"critic": "one", "pair": "two"})
    with joined(place, 300.0), launch(roles, options) as run:
        run.groups["actor"].join()
        for check in (check_life, check_joined, check_refusals):
            check(run.groups["rollout"])
        through_ray.test_colocated_roles_read_what_another_left(run)
        through_ray.test_ranks_of_one_shard_share_a_part(run)
        for role in ("critic", "pair"):
            through_ray.test_rows_go_to_other_processes_and_results_come_back(run, role)
        through_ray.test_an_exchange_brings_rows_from_other_processes_and_leaves_none(run)


if __name__ == "__main__":
    main()
