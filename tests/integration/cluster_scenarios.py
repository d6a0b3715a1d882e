"""Scenarios that need a Ray cluster of their own, each run in a process of its own by the tests.

Usage: python -m tests.integration.cluster_scenarios SCENARIO RESULT_FILE; the result is JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rlhub.config.sections.trainer import DeadlineConfig
from rlhub.errors import ClusterLostError, ConfigError, ResourceError, WorkerDiedError
from rlhub.single_controller import ClassWithInitArgs, LaunchOptions, launch
from tests.integration.controller_workers import Probe
from tests.support.processes import alive, all_end

STORE = 200 * 2**20
SILENCE_S = 10.0
"""Without an answer of the head after which it counts as lost: more than one that lives takes on a busy machine."""


def deadlines(**own: float) -> DeadlineConfig:
    """With time for a cluster to start on a busy machine."""
    from rlhub.single_controller.ray import cluster  # reads the environment that the scenario has set by now

    cluster.START_ATTEMPTS = 10
    return DeadlineConfig(resources=600.0, **own)


def _listening() -> list[str]:
    """Addresses on which this process's descendants listen."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            found.update(c.laddr.ip for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN)
    return sorted(found)


def _helpers() -> list[str]:
    """Those of Ray's helpers that run below this process."""
    commands = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            commands.append(" ".join(process.cmdline()))
    return [name for name in ("dashboard.py", "log_monitor.py", "monitor.py", "raylet") if any(f"/{name}" in c for c in commands)]


def _descendants() -> list[str]:
    """Names of this process's that were not ended; what was killed ends when it gets a core."""
    all_end([process.pid for process in psutil.Process().children(recursive=True)])
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.name())
    return found


def _running(pids: list[int]) -> list[int]:
    """Those that were not ended; what was killed ends when it gets a core."""
    all_end(pids)
    return [pid for pid in pids if alive(pid)]


def own_cluster() -> dict[str, Any]:
    """More ranks than cores with a proxy in the way: start, use and close."""
    os.environ.update(http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9")
    ranks = (os.cpu_count() or 1) + 2
    launched = launch(
        {"actor": ClassWithInitArgs(Probe)},
        LaunchOptions(ranks_per_node=ranks, ray_init={"object_store_memory": STORE}, deadline_s=deadlines()),
    )
    actor = launched.groups["actor"]
    listening = _listening()  # before the workers' own rendezvous, whose store torch binds to all interfaces
    result = {
        "ranks": ranks,
        "per_rank": actor.per_rank(list(range(ranks))),
        "sum": actor.all_reduce(),
        "niceness": actor.niceness(),
        "listening": listening,
        "helpers": _helpers(),
        "pids": [worker.pid for worker in actor.workers],
        "children": actor.start_child(),
    }
    launched.close()
    result["left"] = _running(result["pids"] + result["children"])
    result["descendants"] = _descendants()
    return result


def refusals() -> dict[str, Any]:
    """A cluster that is too small, and settings that make no sense."""
    result: dict[str, Any] = {}
    begin = time.monotonic()
    for name, ray_init, device in (
        ("cpus", {"num_cpus": 1, "object_store_memory": STORE}, "cpu"),
        ("gpus", {"num_gpus": 0, "object_store_memory": STORE}, "cuda"),
        ("join", {"address": "127.0.0.1:1", "num_cpus": 3}, "cpu"),
    ):
        try:
            options = LaunchOptions(ranks_per_node=2, ray_init=ray_init, device=device, deadline_s=deadlines())  # type: ignore[arg-type]
            launch({"actor": ClassWithInitArgs(Probe)}, options)
        except (ResourceError, ConfigError) as error:
            result[name] = str(error)
    result["seconds"] = time.monotonic() - begin
    return result


def two_nodes() -> dict[str, Any]:
    """Two nodes of different size with addresses of their own, then the loss of one."""
    from ray.cluster_utils import Cluster

    small = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
    )
    lost = cluster.add_node(**small)
    cluster.wait_for_nodes()
    from rlhub.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, connect

    connection = connect({"address": cluster.address}, device="cpu", num_ranks=3)
    pool = RayResourcePool([1, 2], wait_for_nodes=True, deadline_s=300)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Probe, tp=1), name_prefix="actor")
    environments = group.environment()
    result: dict[str, Any] = {
        "owned": connection.owned,
        "node_ids": [slot.node_id for slot in pool.slots()],
        "local": [(env["RANK"], env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) for env in environments],
        "sum": group.all_reduce(),
    }
    group.deadline_s = DeadlineConfig(update=400.0)
    begin = time.monotonic()
    cluster.remove_node(lost, allow_graceful=False)
    try:
        while time.monotonic() - begin < 400:  # the lost node's workers notice a moment later than the node itself
            group.replicate(1)
            time.sleep(0.1)
    except WorkerDiedError as error:
        result["lost"] = [error.role, error.rank, time.monotonic() - begin]
    group.close(20.0)
    result["left"] = _running([worker.pid for worker in group.workers])
    pool.release()
    import ray

    ray.shutdown()
    cluster.shutdown()
    return result


def _heads() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name() == "gcs_server":
                found.append(process)
    return found


def lost_head() -> dict[str, Any]:
    """The head of an own cluster is killed, and of another one stopped, while a call is under way."""
    result: dict[str, Any] = {}
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        launched = launch(
            {"actor": ClassWithInitArgs(Probe)},
            LaunchOptions(ray_init={"object_store_memory": STORE}, deadline_s=deadlines(cluster=SILENCE_S)),
        )
        actor = launched.groups["actor"]
        pids = [worker.pid for worker in actor.workers] + actor.start_child()
        call = actor.sleep_on.submit(0, 300.0)
        (head,) = _heads()
        head.send_signal(number)
        begin = time.monotonic()
        try:
            call.get()
        except ClusterLostError as error:
            result[name] = {"message": str(error), "seconds": time.monotonic() - begin}
        launched.close()
        result[name] |= {"closed": time.monotonic() - begin, "left": _running(pids), "descendants": _descendants()}
    return result


def lost_joined() -> dict[str, Any]:
    """The head of a cluster that a driver has joined stands still."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False}
    )
    (head,) = _heads()
    command = [sys.executable, "-m", "tests.integration.cluster_scenarios", "join_until_lost", cluster.address]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    pids = json.loads(driver.stdout.readline())
    head.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    message = driver.stdout.readline()
    code = driver.wait(300.0)
    result = {"message": message, "code": code, "seconds": time.monotonic() - begin, "left": _running(pids)}
    head.kill()
    cluster.shutdown()
    return result


def join_until_lost() -> dict[str, Any]:
    """A driver of `lost_joined`."""
    launched = launch(
        {"actor": ClassWithInitArgs(Probe)},
        LaunchOptions(ray_init={"address": sys.argv[2]}, deadline_s=deadlines(cluster=SILENCE_S)),
    )
    actor = launched.groups["actor"]
    pids = [worker.pid for worker in actor.workers] + actor.start_child()
    call = actor.sleep_on.submit(0, 300.0)
    sys.stdout.write(json.dumps(pids) + "\n")
    sys.stdout.flush()
    try:
        call.get()
    except ClusterLostError as error:
        sys.stdout.write(f"{error}\n")
    launched.close()
    sys.exit(0)


def killed_driver() -> dict[str, Any]:
    """What a cluster's own processes do when the process that started it is killed."""
    program = [sys.executable, "-m", "tests.integration.cluster_scenarios", "wait_to_be_killed", ""]
    driver = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None and driver.stdout.readline() == "up\n"
    processes = psutil.Process(driver.pid).children(recursive=True)
    names = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            names.append(" ".join(process.cmdline())[:60])
    driver.kill()
    driver.communicate()
    begin = time.monotonic()
    ended = all_end([process.pid for process in processes], within_s=120.0)
    return {"names": names, "ended": ended, "seconds": time.monotonic() - begin}


def wait_to_be_killed() -> dict[str, Any]:
    """A driver of `killed_driver`."""
    options = LaunchOptions(ray_init={"object_store_memory": STORE}, deadline_s=deadlines())
    launched = launch({"actor": ClassWithInitArgs(Probe)}, options)
    launched.groups["actor"].start_child()
    sys.stdout.write("up\n")
    sys.stdout.flush()
    time.sleep(3600.0)
    return {}


SCENARIOS = (own_cluster, refusals, two_nodes, lost_head, lost_joined, join_until_lost, killed_driver, wait_to_be_killed)

if __name__ == "__main__":
    scenario = {function.__name__: function for function in SCENARIOS}[sys.argv[1]]
    Path(sys.argv[2]).write_text(json.dumps(scenario()))
