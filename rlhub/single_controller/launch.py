"""`launch` and `start_async_actor`: the one way a run gets its workers and actors, and the backend that needs no Ray.

Under `backend="ray"` every rank and every actor has a process of its own (`ray/`).  Under `backend="local"` all of them live in
this process, at world size 1, so that a breakpoint in a worker is a breakpoint in the terminal.  Calls of a worker group then run
at once in the caller's thread; a running call cannot be interrupted from its own thread, so a deadline is only reported when it
has passed.  Batches are passed as shallow copies: a worker may add, drop or rename columns of its batch, as it may under Ray,
without changing the driver's.  An AsyncActor lives on the event loop of a thread of its own, and its arguments and results are
not copied.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Protocol, Self

from rlhub.errors import ConfigError, DeadlineError, WorkerDiedError
from rlhub.protocol import DataProto, DataProtoFuture
from rlhub.single_controller.async_actor import AsyncActor
from rlhub.single_controller.calls import CallObserver, PendingCall, Request, Watch, WorkerInfo
from rlhub.single_controller.invoke import ActorObject, RankWorkers, RemoteError
from rlhub.single_controller.replicated import launch_replicated
from rlhub.single_controller.resources import AsyncActorOptions, Backend, LaunchOptions
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext, applied_env
from rlhub.single_controller.worker_group import WorkerGroup
from rlhub.utils.aio.loop_thread import LoopThread
from rlhub.utils.ports import free_port

logger = logging.getLogger(__name__)


def launch(roles: Mapping[str, ClassWithInitArgs], options: LaunchOptions | None = None) -> Launched:
    """Starts one process per rank that hosts every role (nnodes x ranks_per_node ranks), and returns the groups.

    Raises ResourceError, DeadlineError, WorkerError (a role's constructor failed), ConfigError.  On any error nothing that
    was started is left behind.
    """
    options = options or LaunchOptions()
    run: StartedRun
    if options.backend == "local":
        run = launch_local(roles, options)
    elif options.backend == "ray":
        from rlhub.single_controller.ray.group import launch_ray  # here, for the local backend must not need Ray

        run = launch_ray(roles, options)
    elif options.backend == "replicated":
        run = launch_replicated(roles, options)
    else:
        raise _unknown(options.backend)
    for group in run.groups.values():
        group.deadline_s = options.deadline_s
    return Launched(run, options.deadline_s.shutdown)


def start_async_actor(spec: ClassWithInitArgs, options: AsyncActorOptions, *, backend: Backend = "ray") -> AsyncActor:
    """Starts an actor and waits until its object is built.  Under Ray the cluster must be connected.

    Raises WorkerError (the constructor failed), WorkerDiedError, DeadlineError, ResourceError (no cluster), ConfigError.
    On any error nothing that was started is left behind.
    """
    if backend == "local":
        return LocalAsyncActor(spec, options)
    if backend == "ray":
        from rlhub.single_controller.ray.async_actor import start_ray_actor

        return start_ray_actor(spec, options)
    raise _unknown(backend)


async def astart_async_actor(spec: ClassWithInitArgs, options: AsyncActorOptions, *, backend: Backend = "ray") -> AsyncActor:
    """Does as `start_async_actor` without blocking the event loop; several may start at the same time."""
    return await asyncio.to_thread(start_async_actor, spec, options, backend=backend)


def _unknown(backend: str) -> ConfigError:
    return ConfigError(f"no backend {backend!r}; known: ray, local, and for worker groups replicated")


class Launched:
    """The worker groups of a run by role.  A context manager; `close` ends all processes and may be called twice."""

    def __init__(self, run: StartedRun, shutdown_deadline_s: float) -> None:
        self._run: StartedRun | None = run
        self._shutdown_deadline_s = shutdown_deadline_s
        self.groups = run.groups

    def close(self) -> None:
        """Ends every process of the run within the shutdown deadline, also when some are dead or hung."""
        run, self._run = self._run, None
        if run is not None:
            run.close(self._shutdown_deadline_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class StartedRun(Protocol):
    """The result of a backend's launch."""

    groups: dict[str, WorkerGroup]

    def close(self, deadline_s: float) -> None: ...


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
        """Lets the workers release their resources.  Failures of theirs are logged."""
        try:
            self._rank.close()
        except RemoteError as failure:
            logger.warning("while closing: %s", failure.error)
        finally:
            self._env.__exit__(None, None, None)


_in_worker: ContextVar[bool] = ContextVar("rlhub_in_worker", default=False)
"""True while a worker's method runs: the futures that it reads do not reach the driver."""


class LocalWorkerGroup(WorkerGroup):
    """A role in this process.  Groups of one `launch_local` share the rank's workers, as colocated roles share a process."""

    def __init__(self, role: str, spec: ClassWithInitArgs, rank: RankWorkers, observers: Sequence[CallObserver] = ()) -> None:
        super().__init__(role, spec.cls, observers)
        self._rank = rank
        self._workers = (WorkerInfo(rank=0, node="127.0.0.1", pid=os.getpid()),)

    @property
    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._workers

    @property
    def processes(self) -> object:
        return self._rank

    def _send(self, request: Request) -> PendingCall:
        share = request.ranks[0]
        args = [_own_columns(value) for value in share.args]
        kwargs = {name: _own_columns(value) for name, value in share.kwargs.items()}
        start = time.monotonic()
        inside = _in_worker.set(True)
        try:
            output = self._rank.run(
                request.worker, request.method, args, kwargs, materialize=request.materialize, retain=request.retain
            )
        except RemoteError as failure:
            return _Finished({}, failure)
        finally:
            _in_worker.reset(inside)
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


class _Finished(PendingCall):
    """A call that has ended: its outputs, or the failure to raise whenever they are read."""

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
            if not _in_worker.get():
                watch.receive(references)
            return references

        def measure(references: list[Any]) -> list[int]:
            self.wait()
            return list(map(len, references))

        return DataProtoFuture([self._outputs.get(rank) for rank in ranks], resolve, measure)


class LocalAsyncActor:
    """An AsyncActor in this process; see the module docstring."""

    def __init__(self, spec: ClassWithInitArgs, options: AsyncActorOptions) -> None:
        self.name = options.name
        self._thread = LoopThread(options.name)
        self._killed = False
        self._object = ActorObject(options.max_concurrency)
        context = WorkerContext(role=options.name, device=options.device, master_port=int(os.environ.get("MASTER_PORT", 0)))
        try:
            for module in options.plugins:
                importlib.import_module(module)
            self._thread.run(self._object.build(spec, context), timeout=options.start_deadline_s)
        except RemoteError as failure:
            self.kill()
            raise failure.error from (failure.__cause__ or failure.cause)
        except TimeoutError:
            self.kill()
            raise DeadlineError(
                f"{self.name}.__init__", options.start_deadline_s, "its thread goes on in the background"
            ) from None
        except BaseException:
            self.kill()
            raise

    @property
    def ended(self) -> bool:
        return self._killed

    async def call(self, method: str, *args: Any, deadline_s: float | None = None, **kw: Any) -> Any:
        if self._killed:
            raise self._death(method)
        call = _LocalCall(self._object.run(method, args, kw), self._thread.loop)
        if not call.send():
            raise self._death(method)
        timer = None if deadline_s is None else call.caller.call_later(deadline_s, call.expire)
        try:
            await call.ended
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if call.expired:
            raise DeadlineError(f"{self.name}.{method}", float(deadline_s or 0.0))
        if call.task is None or call.task.cancelled():
            raise self._death(method) if self._killed else self._object.cancelled_itself(method).error
        try:
            return call.task.result()
        except RemoteError as failure:
            raise failure.error from (failure.__cause__ or failure.cause)

    @property
    def address(self) -> LocalAsyncActor:
        return self

    def begin(self, method: str, *args: Any, deadline_s: float | None = None) -> Callable[[], Any]:
        """Is the actor's own ActorAddress, from any thread but its own."""
        if self._killed:
            raise self._death(method)
        call = asyncio.run_coroutine_threadsafe(self._object.run(method, args, {}), self._thread.loop)

        def wait() -> Any:
            try:
                return call.result(deadline_s)
            except TimeoutError:
                raise DeadlineError(f"{self.name}.{method}", deadline_s or 0.0) from None
            except RemoteError as failure:
                raise failure.error from (failure.__cause__ or failure.cause)
            except CancelledError:
                raise self._death(method) from None

        return wait

    def connect(self) -> LocalAsyncActor:
        return self

    async def until_ended(self) -> None:
        if not self._killed:
            lasting = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.Event().wait(), self._thread.loop))
            try:
                await asyncio.wait((lasting,))
            finally:
                lasting.cancel()

    def kill(self) -> None:
        if not self._killed:
            self._killed = True
            self._thread.stop_soon()

    def _death(self, method: str) -> WorkerDiedError:
        return WorkerDiedError(f"it was ended while or before it ran {method}", role=self.name, rank=0, node="127.0.0.1")


class _LocalCall:
    """One call on its way from the caller's loop to the actor's and back: each way is one message between the threads.

    A concurrent.futures.Future in between (asyncio.run_coroutine_threadsafe) costs a lock and a chain of callbacks on both
    sides, several times what a short method takes.
    """

    __slots__ = ("caller", "ended", "expired", "loop", "task", "work")

    def __init__(self, work: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> None:
        self.work, self.loop = work, loop
        self.caller = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self.caller.create_future()
        self.task: asyncio.Task[Any] | None = None
        self.expired = False

    def send(self) -> bool:
        """Sends the call; returns False if the actor's loop was closed a moment ago."""
        try:
            self.loop.call_soon_threadsafe(self._start)
        except RuntimeError:
            self.work.close()
            return False
        return True

    def cancel(self) -> None:
        """Cancels the method: the caller waits no longer."""
        with suppress(RuntimeError):  # the loop is closed: nothing runs there
            self.loop.call_soon_threadsafe(self._cancel)

    def expire(self) -> None:
        """Ends the wait at the deadline, and cancels the method."""
        if not self.ended.done():
            self.expired = True
            self.ended.set_result(None)
            self.cancel()

    def _start(self) -> None:
        self.task = self.loop.create_task(self.work)
        self.task.add_done_callback(self._answer)

    def _cancel(self) -> None:
        if self.task is not None:  # the loop runs what it is sent in order, so the call has started
            self.task.cancel()

    def _answer(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # so that one whose caller has gone is not logged as never retrieved
        with suppress(RuntimeError):  # the caller's loop is closed: nobody waits
            self.caller.call_soon_threadsafe(self._settle)

    def _settle(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
