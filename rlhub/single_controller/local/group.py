"""Worker groups whose single rank lives in the driver's own process.

Calls run at once in the caller's thread.  Batches are passed as shallow copies: a worker may add, drop or rename columns
of what it was given, as it may under Ray, without the driver's batch changing.  A running call cannot be interrupted from
its own thread, so a deadline is only reported when it has passed.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rlhub.errors import ConfigError
from rlhub.protocol import DataProto, DataProtoFuture
from rlhub.single_controller.calls import PendingCall, Request, Watch
from rlhub.single_controller.invoke import RemoteError, RoleHost
from rlhub.single_controller.observer import CallObserver, WorkerInfo
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext, applied_env
from rlhub.single_controller.worker_group import WorkerGroup
from rlhub.utils.ports import free_port

logger = logging.getLogger(__name__)


class _Finished(PendingCall):
    """A call that is over: its outputs, or the failure to raise whenever it is asked for."""

    def __init__(self, outputs: dict[int, Any], failure: RemoteError | None) -> None:
        self._outputs = outputs
        self._failure = failure

    def wait(self) -> dict[int, Any]:
        if self._failure is not None:
            raise self._failure.error from (self._failure.__cause__ or self._failure.cause)
        return self._outputs

    def done(self) -> bool:
        return True

    def data_future(self, ranks: Sequence[int], watch: Watch) -> DataProtoFuture:
        watch.end(self._failure and self._failure.error)

        def resolve(references: list[Any]) -> list[DataProto]:
            self.wait()
            return references

        return DataProtoFuture([self._outputs.get(rank) for rank in ranks], resolve)


class LocalWorkerGroup(WorkerGroup):
    """A role in this process.  Groups made by one `launch_local` share their host, as colocated roles share a process."""

    def __init__(self, role: str, spec: ClassWithInitArgs, host: RoleHost, observers: Sequence[CallObserver] = ()) -> None:
        super().__init__(role, spec.cls, observers)
        self._host = host
        self._workers = (WorkerInfo(rank=0, node="127.0.0.1", pid=os.getpid()),)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._workers

    def _send(self, request: Request) -> PendingCall:
        rank = request.ranks[0]
        start = time.monotonic()
        try:
            output = self._host.call(
                request.role,
                request.method,
                [_own_columns(value) for value in rank.args],
                {name: _own_columns(value) for name, value in rank.kwargs.items()},
                materialize=request.materialize,
            )
        except RemoteError as failure:
            return _Finished({}, failure)
        seconds = time.monotonic() - start
        if request.deadline_s is not None and seconds > request.deadline_s:
            logger.warning("%s took %.1f s, its deadline is %g s", request.name, seconds, request.deadline_s)
        return _Finished({0: _own_columns(output)}, None)

    def close(self, deadline_s: float = 60.0) -> None:
        if not self._closed:
            self._closed = True
            self._host.close()


def _own_columns(value: Any) -> Any:
    return value.select() if isinstance(value, DataProto) else value


class LocalRun:
    """All roles of a run in this process; `close` restores the environment."""

    def __init__(
        self, roles: Mapping[str, ClassWithInitArgs], *, device: str, plugins: Sequence[str], observers: Sequence[CallObserver]
    ) -> None:
        self._host = RoleHost()
        self._env = applied_env(WorkerContext(device=device, master_port=free_port("127.0.0.1")).env())
        self._env.__enter__()
        self.groups: dict[str, WorkerGroup] = {}
        try:
            for module in plugins:
                importlib.import_module(module)
            for role, spec in roles.items():
                context = WorkerContext(role=role, device=device, master_port=int(os.environ["MASTER_PORT"]))
                self._host.add(spec, context)
                self.groups[role] = LocalWorkerGroup(role, spec, self._host, observers)
        except RemoteError as failure:
            self.close()
            raise failure.error from failure.__cause__
        except BaseException:
            self.close()
            raise

    def close(self, deadline_s: float = 60.0) -> None:
        """Let the workers release what they hold.  Failures of theirs are logged."""
        try:
            self._host.close()
        except RemoteError as failure:
            logger.warning("while closing: %s", failure.error)
        finally:
            self._env.__exit__(None, None, None)


def launch_local(
    roles: Mapping[str, ClassWithInitArgs],
    *,
    nnodes: int = 1,
    ranks_per_node: int = 1,
    device: str = "cpu",
    plugins: Sequence[str] = (),
    observers: Sequence[CallObserver] = (),
) -> LocalRun:
    """Build all roles in this process.  Raises ConfigError for more than one rank, WorkerError when a role cannot start."""
    if nnodes * ranks_per_node != 1:
        raise ConfigError(
            f"trainer.backend=local runs one rank in this process, but trainer.nnodes={nnodes} x "
            f"trainer.n_gpus_per_node={ranks_per_node} = {nnodes * ranks_per_node}; set both to 1 or use trainer.backend=ray"
        )
    return LocalRun(roles, device=device, plugins=plugins, observers=observers)
