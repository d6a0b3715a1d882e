"""Ends what a run started: every process that carries the run's marker in its environment, children's children included.

Ray kills its own workers, but not what they started (engines, reward children, servers), and a worker that was killed
cannot clean up after itself.  The marker is inherited, so such processes are found whatever their parent now is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable
from contextlib import suppress

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhub.single_controller.ray.watch import loss

logger = logging.getLogger(__name__)

MARKER = "RLHUB_RUN_MARKER"
GRACE_S = 3.0
TRACKER = "multiprocessing.resource_tracker"
"""Python's own child that removes the shared memory of killed processes, and ends, when the last of them is gone."""


def marked_processes(marker: str) -> list[psutil.Process]:
    """Returns the live processes of this machine whose environment carries `marker` (zombies and other users' do not count)."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARKER) == marker and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess, OSError):
            continue
    return found


def end_marked(marker: str, deadline_s: float) -> list[int]:
    """Kills them until none is left or the deadline has passed; returns the pids that are still there.

    Ray is ending its own at this moment and reports one that vanishes first as a crash, so they get a moment.
    """
    deadline = time.monotonic() + deadline_s
    left = _outlive(marked_processes(marker), min(GRACE_S, deadline_s / 2), marker)
    while left and time.monotonic() < deadline:
        trackers = [process for process in left if _is_tracker(process)]
        _kill(process for process in left if process not in trackers)
        left = _outlive(left, GRACE_S if len(trackers) == len(left) else 0.5, marker)
        _kill(trackers if len(trackers) == len(left) else ())
    if left:
        logger.warning("processes of this run that could not be ended: %s", [process.pid for process in left])
    return [process.pid for process in left]


def _outlive(processes: Collection[psutil.Process], seconds: float, marker: str) -> list[psutil.Process]:
    """Returns those that are not gone after `seconds`, and those that are new.  A process that is being ended has no environment
    any more, but for a while its memory and its devices."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return list({*filter(_is_whole, alive), *marked_processes(marker)})


def _is_whole(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _is_tracker(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return any(TRACKER in argument for argument in process.cmdline())
    return False


def end_on_nodes(marker: str, node_ids: Collection[str], deadline_s: float) -> None:
    """Makes sure that no marked process is left, here and on these nodes of the cluster; where that is lost, here alone."""
    if loss() is not None:
        end_marked(marker, deadline_s)
        return
    here = ray.get_runtime_context().get_node_id()
    sweep = ray.remote(num_cpus=0, max_retries=0)(end_marked)
    references = [
        sweep.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(marker, deadline_s)
        for node_id in sorted(set(node_ids) - {here})
    ]
    end_marked(marker, deadline_s)
    if references:
        ray.wait(references, num_returns=len(references), timeout=deadline_s)
