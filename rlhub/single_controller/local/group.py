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
from rlhub.single_controller.calls import CallObserver, PendingCall, Request, Watch, WorkerInfo
from rlhub.single_controller.invoke import RankWorkers, RemoteError
from rlhub.single_controller.resources import LaunchOptions
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext, applied_env
from rlhub.single_controller.worker_group import WorkerGroup
from rlhub.utils.ports import free_port

logger = logging.getLogger(__name__)


class _Finished(PendingCall):
    """A call that has ended: its outputs, or the failure to raise whenever they are asked for."""

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
    """A role in this process.  Groups of one `launch_local` share the rank's workers, as colocated roles share a process."""

    def __init__(self, role: str, spec: ClassWithInitArgs, rank: RankWorkers, observers: Sequence[CallObserver] = ()) -> None:
        super().__init__(role, spec.cls, observers)
        self._rank = rank
        self._workers = (WorkerInfo(rank=0, node="127.0.0.1", pid=os.getpid()),)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._workers

    def _send(self, request: Request) -> PendingCall:
        share = request.ranks[0]
        args = [_own_columns(value) for value in share.args]
        kwargs = {name: _own_columns(value) for name, value in share.kwargs.items()}
        start = time.monotonic()
        try:
            output = self._rank.run(request.role, request.method, args, kwargs, materialize=request.materialize)
        except RemoteError as failure:
            return _Finished({}, failure)
        seconds = time.monotonic() - start
        deadline = request.deadline
        if seconds > deadline.seconds:
            logger.warning("%s took %.1f s, its deadline is %g s (%s)", request.name, seconds, deadline.seconds, deadline.setting)
        return _Finished({0: _own_columns(output)}, None)

    def close(self, deadline_s: float = 60.0) -> None:
        if not self._closed:
            self._closed = True
            self._rank.close()


def _own_columns(value: Any) -> Any:
    return value.select() if isinstance(value, DataProto) else value


class LocalRun:
    """All roles of a run in this process; `close` restores the environment."""

    def __init__(self, roles: Mapping[str, ClassWithInitArgs], options: LaunchOptions) -> None:
        self._rank = RankWorkers()
        self._env = applied_env(WorkerContext(device=options.device, master_port=free_port("127.0.0.1")).env())
        self._env.__enter__()
        self.groups: dict[str, WorkerGroup] = {}
        try:
            for module in options.plugins:
                importlib.import_module(module)
            for role, spec in roles.items():
                context = WorkerContext(role=role, device=options.device, master_port=int(os.environ["MASTER_PORT"]))
                self._rank.add(spec, context)
                self.groups[role] = LocalWorkerGroup(role, spec, self._rank, options.observers)
        except RemoteError as failure:
            self.close()
            raise failure.error from failure.__cause__
        except BaseException:
            self.close()
            raise

    def close(self, deadline_s: float = 60.0) -> None:
        """Lets the workers release what they hold.  Failures of theirs are logged."""
        try:
            self._rank.close()
        except RemoteError as failure:
            logger.warning("while closing: %s", failure.error)
        finally:
            self._env.__exit__(None, None, None)


def launch_local(roles: Mapping[str, ClassWithInitArgs], options: LaunchOptions) -> LocalRun:
    """Builds all roles in this process.  Raises ConfigError for more than one rank, WorkerError when a role cannot start."""
    if options.placement:
        raise ConfigError(f"backend=local has no second pool for {', '.join(options.placement)}; use backend=ray")
    ranks = options.nnodes * options.ranks_per_node
    if ranks != 1:
        raise ConfigError(
            f"trainer.backend=local runs one rank in this process, but trainer.nnodes={options.nnodes} x "
            f"trainer.n_gpus_per_node={options.ranks_per_node} = {ranks}; set both to 1 or use trainer.backend=ray"
        )
    return LocalRun(roles, options)
