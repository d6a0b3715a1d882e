"""`WorkerProcess`, the Ray actor of one rank, and how a fresh process of Ray's becomes a rank or the home of an AsyncActor: it
says where it is, and takes its environment, log file, import path and plugins."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from rlhub.errors import DispatchError
from rlhub.protocol import DataProto, Retain
from rlhub.single_controller.calls import WorkerInfo
from rlhub.single_controller.invoke import RankWorkers, failures_of
from rlhub.single_controller.ray.nodes import own_address
from rlhub.single_controller.ray.pending import typed_error
from rlhub.single_controller.ray.reaper import MARKER
from rlhub.single_controller.worker import VISIBLE_DEVICES, WorkerContext
from rlhub.utils import faults
from rlhub.utils.faults import FaultPlan
from rlhub.utils.ports import free_port


@dataclass(slots=True, kw_only=True, frozen=True)
class ProcessIdentity:
    """The facts of a fresh process that the driver needs to place it.  free_port: free on its node a moment ago."""

    node_id: str
    node_ip: str
    pid: int
    gpu_ids: tuple[str, ...]
    free_port: int


@dataclass(slots=True, kw_only=True, frozen=True)
class ProcessSetup:
    """The settings that make a process a rank.  log_file: "" keeps Ray's own log files.  log_level: that of the worker's root
    logger.  faults: the run's fault plan."""

    context: WorkerContext
    env: dict[str, str]
    python_path: tuple[str, ...]
    log_file: str
    log_level: int
    plugins: tuple[str, ...]
    faults: FaultPlan | None


def own_identity() -> ProcessIdentity:
    """Returns the identity of the process that asks."""
    runtime = ray.get_runtime_context()
    address = own_address()
    return ProcessIdentity(
        node_id=runtime.get_node_id(),
        node_ip=address,
        pid=os.getpid(),
        gpu_ids=tuple(runtime.get_accelerator_ids().get("GPU", ())),
        free_port=free_port(),
    )


def prepare_process(setup: ProcessSetup) -> None:
    """Takes the rank's environment, log file and import path, and imports the plugins.  Raises RemoteError."""
    with failures_of(setup.context, "prepare"):
        os.environ.update(setup.env)
        if setup.log_file:
            _redirect_output(setup.log_file)
        _configure_logging(setup)
        sys.path.extend(entry for entry in setup.python_path if entry not in sys.path)
        for module in setup.plugins:
            importlib.import_module(module)
        faults.install(setup.faults, rank=setup.context.rank)


def start_environment(device: str, worker_env: Mapping[str, str], marker: str) -> dict[str, str]:
    """Returns the variables that the process has from its first moment, and hands on to its children."""
    # Processes on CPU share the cores, so each gets one thread, and one heap for all the threads that wait: what one frees the
    # others can use.  On GPU nodes the user's or Ray's setting stands.
    shares = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"} if device == "cpu" else {}
    return {**shares, **worker_env, MARKER: marker}


def visible_devices(identities: Mapping[int, ProcessIdentity], local_ranks: Sequence[int]) -> str:
    """Returns CUDA_VISIBLE_DEVICES for the ranks of one node entry: all their GPUs in local-rank order, so that LOCAL_RANK is the
    device number (what torchrun does, and what engines with several ranks per node expect)."""
    return ",".join(gpu for other in local_ranks for gpu in identities[other].gpu_ids)


def rank_environment(context: WorkerContext, devices: str) -> dict[str, str]:
    """Returns the variables that define the rank for torch.distributed and the engines."""
    env = {**context.env(), VISIBLE_DEVICES: devices}
    if context.master_addr.startswith("127.") and "GLOO_SOCKET_IFNAME" not in os.environ:
        # gloo picks its interface by the host name, which need not resolve to loopback.
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def _redirect_output(log_file: str) -> None:
    """Sends the process's stdout and stderr, native code's too, to a file."""
    path = Path(log_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _configure_logging(setup: ProcessSetup) -> None:
    context = setup.context
    line = f"%(asctime)s %(levelname)s [rank {context.rank} {context.node}] %(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=setup.log_level, format=line, force=True)
    faulthandler.enable(file=sys.stderr)
    # The driver asks for the stacks when a deadline has passed.
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)


@dataclass(slots=True, kw_only=True, frozen=True)
class CallHeader:
    """The method to run.  The values follow as arguments of the actor call, because Ray fetches references only there; the last
    `len(keywords)` of them are keyword arguments.

    as_data: the output is a batch; its number of rows travels apart, so it can be had without them.  reply: False keeps the
    output in the worker.  step: the driver's, for the fault plan.  retain: what of the output stays in the process.
    """

    role: str
    method: str
    keywords: tuple[str, ...]
    materialize: bool
    as_data: bool
    reply: bool
    step: int
    retain: Retain | None = None


class ObjectStoreHandover:
    """Hands pieces of rows over in Ray's object store, which belongs to the process that puts them.  A handle is the reference,
    and where that process is."""

    def put(self, piece: Tensor) -> tuple[Any, str, int]:
        return ray.put(piece.numpy()), own_address(), os.getpid()

    def get(self, handle: tuple[Any, str, int], role: str, rank: int) -> Tensor:
        reference, node, pid = handle
        try:
            return torch.from_numpy(ray.get(reference))
        except RayError as error:
            raise typed_error(error, role, WorkerInfo(rank=rank, node=node, pid=pid), "receive") from None


class WorkerProcess(RankWorkers):
    """The Ray actor of one rank: it has the workers of all roles of its pool and runs their methods.

    The actor is synchronous with one thread, so methods run in the process's main thread, in the order in which they were sent.
    """

    def __init__(self) -> None:
        super().__init__(ObjectStoreHandover())

    def identity(self) -> ProcessIdentity:
        """Returns where this process is."""
        return own_identity()

    def prepare(self, setup: ProcessSetup) -> None:
        """Makes this process a rank: environment, log file, import path and plugins."""
        prepare_process(setup)

    def call(self, header: CallHeader, *values: Any) -> Any:
        """Runs a method and returns its output, or (batch, rows) for data; nothing where no reply is wanted."""
        split = len(values) - len(header.keywords)
        kwargs = dict(zip(header.keywords, values[split:], strict=True))
        output = self.run(
            header.role,
            header.method,
            values[:split],
            kwargs,
            materialize=header.materialize,
            step=header.step,
            retain=header.retain,
        )
        if not header.as_data:
            return output if header.reply else None
        if not header.reply:
            return None, 0
        if not isinstance(output, DataProto):
            raise DispatchError(
                f"{header.role}.{header.method} must return a DataProto for its dispatch mode, got {type(output).__name__}"
            )
        return output, len(output)
