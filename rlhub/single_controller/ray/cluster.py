"""Starts or joins a Ray cluster, with settings that suit one training job.

A cluster started here listens on loopback, has no dashboard and none of the helper processes that serve it, does not report
usage, runs its workers at normal priority and counts logical CPUs, so that more CPU ranks than cores still start.  It ends with
the process that started it, also when that is killed.  A cluster that is joined is left as it is.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private.node import Node

from rlhub.errors import ConfigError, ResourceError
from rlhub.single_controller.ray import orphans
from rlhub.single_controller.ray.nodes import (
    LOCAL,
    ClusterAddress,
    describe_nodes,
    head_address,
    read_address,
    silence,
)
from rlhub.single_controller.ray.watch import head_answers, loss, unwatch, watch_cluster
from rlhub.single_controller.worker import applied_env

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
START_ATTEMPTS = 3
DISCARD_PORT = 9
CLUSTER_MARKER = "RLHUB_CLUSTER_MARKER"
"""Variable that the processes of a cluster started here carry, and hand on."""
NO_SIGTERM = "SIGTERM handler is not set"
RAYS_FOLDER = os.path.dirname(ray.__file__) + os.sep
EXEC_SECONDS = 5.0  # milliseconds, unless the machine is very busy
TIMED_OUT = "The current node timed out during startup"  # how Ray says so
_ONLY_WHEN_STARTING = ("num_cpus", "num_gpus", "resources", "object_store_memory")
EXCLUDES = (
    ".git", ".venv*", "venv", "checkpoints", "outputs", "wandb", "logs", "__pycache__", "*.egg-info",
    ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", "*.safetensors", "*.bin", "*.parquet", ".env",
)  # fmt: skip
"""Patterns in the form of gitignore.  Data and weights are read from paths that all nodes see, not shipped with the code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaper:
    """The process that ends the rest of a cluster started here when this one is killed.  entry, folder: by which it is known."""

    process: subprocess.Popen[bytes]
    entry: str
    folder: str

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass(slots=True, kw_only=True)
class Connection:
    """The cluster of this process.  owned: it was started here (so it may be sized, and is stopped).  joined: it was joined here.
    reaper: of an owned cluster."""

    owned: bool
    joined: bool = False
    reaper: Reaper | None = None

    def close(self) -> None:
        lost = loss() is not None or (self.owned and not head_answers())
        if self.owned or self.joined:
            unwatch()
        if lost and ray.is_initialized():
            self._abandon()
        elif self.owned and ray.is_initialized():
            ray.shutdown()
        if self.reaper is not None:
            self.reaper.close()
            self.reaper = None

    def _abandon(self) -> None:
        """Leaves a cluster that was lost.  Ray would ask its head for minutes, also when the interpreter exits: a cluster of our
        own is ended first, and one that was joined is left as it is."""
        if self.reaper is not None:
            orphans.end_left_behind(self.reaper.entry, self.reaper.folder)
            ray.shutdown()
        else:
            atexit.unregister(ray.shutdown)
            atexit.register(_leave)


def _leave() -> None:
    """Ends the interpreter after a joined cluster was lost, when all other exit functions have run: Ray's own end of the process
    would crash.  The status says that it failed."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()  # those of all others
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def connect(
    ray_init: Mapping[str, Any], *, device: str, num_ranks: int, deadline_s: float = 120.0, lost_after_s: float = 30.0
) -> Connection:
    """Uses the cluster of this process if there is one, else joins `ray_init.address` or RAY_ADDRESS, else starts one here.

    num_ranks: worker processes to come; a cluster started on this machine gets at least as many logical CPUs, unless
    `ray_init.num_cpus` says otherwise.  `ray_init.runtime_env="auto"` ships the working directory to the other nodes.
    deadline_s: longest wait for the cluster.  lost_after_s: how long its head may be silent later (see `watch`).
    Raises ResourceError when Ray cannot be reached or started in time, ConfigError for settings that do not go together.
    """
    if ray.is_initialized():
        return Connection(owned=False)
    options = dict(ray_init)
    if options.get("runtime_env") == "auto":
        options["runtime_env"] = build_runtime_env(os.getcwd())
    given = options.pop("address", None)
    address = read_address(given)
    if address is not None:
        _join(address, _join_options(options), deadline_s)
        watch_cluster(address.host, address.port, deadline_s=lost_after_s, owned=False)
        connection = Connection(owned=False, joined=True)
    else:
        connection = Connection(owned=True, reaper=_start(_start_options(options, device, num_ranks), deadline_s))
        host, _, port = head_address().rpartition(":")
        watch_cluster(host, int(port), deadline_s=lost_after_s, owned=True)
    logger.info("%s Ray cluster: %s", "started a" if connection.owned else "joined a", describe_nodes())
    return connection


def build_runtime_env(working_dir: str | Path, env_vars: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns a Ray runtime environment that can be shipped: the source tree without what is large, local or secret.

    It is for `ray.init(runtime_env=...)` or job submission on several nodes that share no source tree.  A single machine needs
    none: its workers import what the driver imports.
    """
    return {"working_dir": str(working_dir), "excludes": list(EXCLUDES), "env_vars": dict(env_vars or {})}


def _join(address: ClusterAddress, options: Mapping[str, Any], deadline_s: float) -> None:
    """Joins the cluster; Ray itself is called only when the head answers.  Should it hang all the same, its thread is left."""
    ends = time.monotonic() + deadline_s
    late = f"not done after {deadline_s:g} s (trainer.deadline_s.resources)"
    logger.info("joining the Ray cluster at %s (%s)", address.given, address.source)
    if (why := silence(address.host, address.port, deadline_s)) is not None:
        raise address.refusal(late if isinstance(why, TimeoutError) else str(why))
    joined: Future[None] = Future()

    def join() -> None:
        try:
            with applied_env(_proxies()), _without_warning(NO_SIGTERM):
                ray.init(address=address.given, **options)
        except BaseException as error:  # noqa: BLE001  handed to the thread that waits
            joined.set_exception(error)
        else:
            joined.set_result(None)

    threading.Thread(target=join, name="join-ray", daemon=True).start()
    try:
        joined.result(max(0.1, ends - time.monotonic()))
    except FutureTimeoutError:
        raise address.refusal(late) from None
    except (ConnectionError, RuntimeError, OSError) as error:
        raise address.refusal(str(error)) from error


@contextmanager
def _without_warning(beginning: str) -> Iterator[None]:
    """Suppresses the warning of Ray's that begins so."""

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginning)

    rays = logging.getLogger("ray._private.worker")
    rays.addFilter(wanted)
    try:
        yield
    finally:
        rays.removeFilter(wanted)


def _start(options: Mapping[str, Any], deadline_s: float) -> Reaper:
    """Starts a cluster; returns what ends the rest of it when this process is killed."""
    marker = uuid.uuid4().hex
    variables = {**_start_environment(with_dashboard=bool(options.get("include_dashboard"))), CLUSTER_MARKER: marker}
    loopback = _on_loopback(options.get("_node_ip_address") == LOOPBACK)
    try:
        with applied_env(variables), loopback, _without_helpers(options), _programs_sigterm():
            _patiently(lambda: ray.init(address=LOCAL, **options), deadline_s)
    except (ConnectionError, RuntimeError, OSError) as error:
        raise ResourceError(f"cannot start Ray here: {error}") from error
    return _start_reaper(f"{CLUSTER_MARKER}={marker}")


def _start_reaper(entry: str) -> Reaper:
    folder = ray._private.worker._global_node.get_session_dir_path()  # type: ignore[attr-defined]
    command = [sys.executable, "-I", "-S", os.path.abspath(orphans.__file__), str(os.getpid()), entry, folder]
    nowhere = subprocess.DEVNULL  # whoever reads this process's output gets its end with this process
    process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, cwd="/", start_new_session=True)
    return Reaper(process=process, entry=entry, folder=folder)


def _patiently(start: Callable[[], object], deadline_s: float) -> None:
    """Starts Ray, again where its own limit of 30 s for its processes was too short, as on a machine that is very busy for a
    while, and the deadline has not passed; what the attempt has started is ended first."""
    ends = time.monotonic() + deadline_s
    for attempt in range(1, START_ATTEMPTS + 1):
        before = _rays_processes()
        try:
            start()
            return
        except Exception as error:
            if not str(error).startswith(TIMED_OUT):  # Ray raises no type of its own for it
                raise
            for process in _rays_processes() - before:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            if attempt == START_ATTEMPTS or time.monotonic() >= ends:
                raise ResourceError(
                    f"its processes were not up after 30 s, {attempt} times in a row "
                    f"(trainer.deadline_s.resources is {deadline_s:g} s). Is the machine very busy, or short of memory? Wait, "
                    "end other work, or join a cluster that runs (ray_init.address)"
                ) from error
            logger.warning("Ray's processes were not up after 30 s: attempt %d of %d", attempt + 1, START_ATTEMPTS)


def _rays_processes() -> set[psutil.Process]:
    """Returns the processes of a cluster that this process started or is starting."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if RAYS_FOLDER in " ".join(_command_line(process)):
                found.add(process)
    return found


def _command_line(process: psutil.Process) -> list[str]:
    """Returns the arguments of a process, once they can be read: Linux lets the starter of a process go on shortly before, and
    until then they are empty."""
    deadline = time.monotonic() + EXEC_SECONDS
    arguments: list[str] = process.cmdline()
    while not arguments and time.monotonic() < deadline:
        time.sleep(0.001)
        arguments = process.cmdline()
    return arguments


@contextmanager
def _programs_sigterm() -> Iterator[None]:
    """Keeps the program's own answer to SIGTERM, such as saving the step and leaving, where ray.init puts one that exits."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(before) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _without_helpers(options: Mapping[str, Any]) -> Iterator[None]:
    """Lets Ray start a node without the processes that nothing here reads from.

    Ray 2.58 has no settings for it, and starts the dashboard's process also where no dashboard is wanted.  They are three Python
    processes of 150 MB; their start needs twice the CPU time of the rest of Ray's, and one reads all logs ten times a second.
    """
    with ExitStack() as stack:
        if options.get("include_dashboard") is False:
            stack.enter_context(_replaced(Node, "start_api_server", lambda node, **_: _name_no_dashboard(node)))
            stack.enter_context(_replaced(Node, "start_monitor", lambda node: None))  # of autoscaling, and of `ray status`
        if options.get("log_to_driver") is False:
            stack.enter_context(_replaced(Node, "start_log_monitor", lambda node: None))
        yield


def _name_no_dashboard(node: Node) -> None:
    """Names an address on which nobody listens, as Ray's own process of a dashboard that is not wanted does: the node's agent,
    which runs nevertheless, logs an error every second until it has one."""
    key, namespace = ray_constants.DASHBOARD_ADDRESS.encode(), ray_constants.KV_NAMESPACE_DASHBOARD
    client = node.get_gcs_client()  # type: ignore[no-untyped-call]
    client.internal_kv_put(key, f"{LOOPBACK}:{DISCARD_PORT}".encode(), True, namespace=namespace)


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


@contextmanager
def _on_loopback(wanted: bool) -> Iterator[None]:
    """Lets Ray's processes bind 127.0.0.1 alone.  Ray 2.58 replaces that address by an outward one, and then listens on all
    interfaces, unless this constant (by default False on desktop systems) says that there will be no second node."""
    with _replaced(ray_constants, "ENABLE_RAY_CLUSTER", ray_constants.ENABLE_RAY_CLUSTER and not wanted):
        yield


def _start_options(options: dict[str, Any], device: str, num_ranks: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "num_cpus": max(os.cpu_count() or 1, num_ranks),
        "include_dashboard": False,
        "log_to_driver": False,
        "logging_level": logging.WARNING,
        "_node_ip_address": LOOPBACK,
    }
    if device == "cpu":
        defaults["num_gpus"] = 0
    return {**defaults, **options}


def _join_options(options: dict[str, Any]) -> dict[str, Any]:
    useless = [name for name in _ONLY_WHEN_STARTING if name in options]
    if useless:
        raise ConfigError(f"ray_init.{useless[0]} has no effect on a cluster that is joined; remove it, or remove the address")
    return {"log_to_driver": False, "logging_level": logging.WARNING, **options}


def _start_environment(with_dashboard: bool) -> dict[str, str]:
    """Returns the variables that Ray's processes read at their start; a user's own setting wins."""
    wanted = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "RAY_enable_metrics_collection": "1" if with_dashboard else "0",  # which alone reads them
        # Ray starts processes ahead, one per CPU, which ranks never use: each of these has an environment of its own.
        "RAY_prestart_worker_first_driver": "0",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | _proxies()


def _proxies() -> dict[str, str]:
    """Returns the variables that keep proxies out: one would swallow the calls between Ray's own processes on this machine."""
    wanted = {}
    for name in ("no_proxy", "NO_PROXY"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        wanted[name] = ",".join(dict.fromkeys([*hosts, "localhost", LOOPBACK]))
    return wanted
