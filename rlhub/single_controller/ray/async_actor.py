"""An AsyncActor in a process of its own: an asyncio Ray actor that ends with the driver, also when the driver is killed.

`RayAsyncActor` is the caller's side; `ActorProcess` is the Ray actor, in whose process the object lives.  The object is built and
called on the actor's event loop, which is not in the process's main thread.

A call of a Ray actor costs about a millisecond, whatever it carries, so many calls of the object share few calls of Ray.  One
call (`collect`) takes along all requests that have come up, waits in the actor, and brings back all results there are; requests
that come up meanwhile travel together in another (`deliver`).  The reference of `collect` is awaited; when the process dies it
fails, and with it all pending calls.  Measured with 200 pending calls that return at once: 1,000 a second with one Ray call each,
7,000 a second this way.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import sys
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlhub.errors import ClusterLostError, DeadlineError, ResourceError, WorkerDiedError
from rlhub.single_controller.calls import Deadline, ObservedCall, WorkerInfo
from rlhub.single_controller.invoke import ActorObject, RemoteError, describe_failure
from rlhub.single_controller.ray.pending import Gather, typed_error
from rlhub.single_controller.ray.process import (
    ProcessIdentity,
    ProcessSetup,
    own_identity,
    prepare_process,
    rank_environment,
    start_environment,
)
from rlhub.single_controller.ray.reaper import end_on_nodes
from rlhub.single_controller.ray.watch import Listener, check_cluster, listen
from rlhub.single_controller.resources import AsyncActorOptions
from rlhub.single_controller.worker import ClassWithInitArgs, WorkerContext, check_worker_env
from rlhub.utils import faults

logger = logging.getLogger(__name__)


_OWN_CALLS = 1000
"""Limit on the actor's `deliver` and `collect` calls, which return at once or wait idly; `ActorObject` limits the object's."""


_REAP_S = 30.0


_COPIES: dict[str | None, int] = {None: 1, "lost": 0, "duplicate": 2}
"""Number of times that a reply is sent, by the fault that strikes it."""


_SETTLE_TURNS = 4
"""Turns of the event loop from an answer until its receiver, through a task runner, has sent its next request: after so many
the answers' successors travel in one Ray call, instead of one each."""


_MAIN = b"__main__"
"""Name of the main script's module in a pickle; other processes have another one."""


CANCEL = b""
"""Stands in place of a request, and ends the call of that number."""


Message = tuple[int, bytes]
"""A request (the pickled method, arguments, keywords, the sender's step) or CANCEL, by the number of its call.  Tuples, because
Ray pickles these ten times as fast as dataclasses."""


Reply = tuple[int, bool, bytes]
"""The end of a call, by its number: whether it failed, and its pickled result or RemoteError."""


def start_ray_actor(spec: ClassWithInitArgs, options: AsyncActorOptions) -> RayAsyncActor:
    """Starts an actor; see `start_async_actor`."""
    check_worker_env(options.worker_env)
    check_cluster()
    if not ray.is_initialized():
        raise ResourceError(f"no Ray cluster for {options.name}: call `launch` or `rlhub.single_controller.ray.connect` first")
    actor = RayAsyncActor(options)
    actor.start(spec)
    return actor


class RayAsyncActor:
    """The caller's side; see the module docstring.  `start_ray_actor` creates it."""

    def __init__(self, options: AsyncActorOptions) -> None:
        self.name = options.name
        self._options = options
        self._marker = uuid.uuid4().hex
        self._ended = False
        self._worker = WorkerInfo(rank=0, node="", pid=0)
        self._node_id = ""
        self._channels: dict[asyncio.AbstractEventLoop, CallChannel] = {}
        self._actor = _create(options, self._marker)

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def worker(self) -> WorkerInfo:
        """The place of its process."""
        return self._worker

    @property
    def address(self) -> RayActorAddress:
        return RayActorAddress(self.name, self._actor, self._worker)

    def start(self, spec: ClassWithInitArgs) -> None:
        """Waits for the process and builds the object."""
        deadline = time.monotonic() + self._options.start_deadline_s
        try:
            identity: ProcessIdentity = self._wait("start", self._actor.identity.remote(), deadline)
            self._node_id = identity.node_id
            log = os.path.join(self._options.log_dir, f"{self.name}.log") if self._options.log_dir else ""
            self._worker = WorkerInfo(rank=0, node=identity.node_ip, pid=identity.pid, log=log)
            self._wait("prepare", self._actor.prepare.remote(self._setup(identity)), deadline)
            self._wait("__init__", self._actor.build.remote(spec), deadline)
        except BaseException:
            self.kill()
            raise

    async def call(self, method: str, *args: Any, deadline_s: float | None = None, **kw: Any) -> Any:
        if self._ended:
            raise self._death(method)
        return await self._channel().call(method, *args, deadline_s=deadline_s, **kw)

    async def until_ended(self) -> None:
        if not self._ended:
            try:
                await self._actor.linger.remote()
            except RayError as error:
                self._note_death(error)

    def kill(self) -> None:
        if not self._ended:
            self._ended = True
            if ray.is_initialized():
                ray.kill(self._actor, no_restart=True)
                # Not a daemon: what the process started is gone before this one ends.
                threading.Thread(target=self._reap, name=f"end-{self.name}").start()

    def _wait(self, what: str, reference: Any, deadline: float) -> Any:
        left = Deadline(seconds=max(0.1, deadline - time.monotonic()))
        return Gather(self.name, what, {0: reference}, {0: self._worker}, left, _nothing).wait()[0]

    def _setup(self, identity: ProcessIdentity) -> ProcessSetup:
        context = WorkerContext(
            role=self.name,
            node=identity.node_ip,
            master_addr=identity.node_ip,
            master_port=identity.free_port,
            device=self._options.device,
        )
        return ProcessSetup(
            context=context,
            env=rank_environment(context, self._options.devices or ",".join(identity.gpu_ids)),
            python_path=tuple(entry or os.getcwd() for entry in sys.path),
            log_file=self._worker.log,
            log_level=logging.getLogger().getEffectiveLevel(),
            plugins=self._options.plugins,
            faults=faults.installed(),
        )

    def _channel(self) -> CallChannel:
        """Returns the channel of this event loop; those of loops that are closed are dropped."""
        loop = asyncio.get_running_loop()
        if loop not in self._channels:
            for old in [other for other in self._channels if other.is_closed()]:
                self._channels.pop(old, None)
            self._channels[loop] = CallChannel(self._actor, self.name, uuid.uuid4().hex, self._explain, self._count)
        return self._channels[loop]

    def _count(self, method: str, **num_bytes: int) -> None:
        """Reports what a call of the method carries to the observers."""
        for observer in self._options.observers:
            call = ObservedCall(role=self.name, method=method, blocking=False, workers=(self._worker,))
            observer.on_transfer(call, **num_bytes)

    def _explain(self, error: BaseException, method: str) -> BaseException:
        if isinstance(error, ClusterLostError):
            return error
        found = typed_error(error, self.name, self._worker, method)
        if isinstance(found, WorkerDiedError):
            self._note_death(error)
        return found

    def _note_death(self, error: BaseException) -> None:
        if not self._ended:
            logger.warning("%s (process %d) has died: %s", self.name, self._worker.pid, str(error).strip().splitlines()[0])
            self.kill()

    def _death(self, method: str) -> WorkerDiedError:
        return WorkerDiedError(
            f"process {self._worker.pid} was ended before it ran {method}", role=self.name, rank=0, node=self._worker.node
        )

    def _reap(self) -> None:
        try:
            end_on_nodes(self._marker, {self._node_id} - {""}, _REAP_S)
        except RayError as error:
            logger.warning("could not look for what %s left behind: %s", self.name, error)


@dataclass(slots=True, frozen=True)
class RayActorAddress:
    """Is the ActorAddress of an actor: its results go to the calling process, and through no other one."""

    name: str
    actor: Any
    worker: WorkerInfo

    def begin(self, method: str, *args: Any, deadline_s: float | None = None) -> Callable[[], Any]:
        reference = self.actor.answer.remote(method, args)

        def wait() -> Any:
            try:
                return ray.get(reference, timeout=deadline_s)
            except GetTimeoutError:
                raise DeadlineError(f"{self.name}.{method}", deadline_s or 0.0) from None
            except RayError as error:
                raise typed_error(error, self.name, self.worker, method) from None

        return wait

    def connect(self) -> CallChannel:
        def explain(error: BaseException, method: str) -> BaseException:
            return typed_error(error, self.name, self.worker, method)

        return CallChannel(self.actor, self.name, uuid.uuid4().hex, explain, _uncounted)


def _create(options: AsyncActorOptions, marker: str) -> Any:
    placement: dict[str, Any] = {}
    if options.slot is not None:
        placement["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
            placement_group=options.slot.group,
            placement_group_bundle_index=options.slot.bundle,
            placement_group_capture_child_tasks=False,
        )
    elif options.node_id:
        placement["scheduling_strategy"] = NodeAffinitySchedulingStrategy(options.node_id, soft=False)
    return (
        ray.remote(ActorProcess)
        .options(
            max_restarts=0,
            max_concurrency=_OWN_CALLS,
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            runtime_env={"env_vars": start_environment(options.device, options.worker_env, marker)},
            **placement,
        )
        .remote(options.max_concurrency)
    )


def _uncounted(method: str, **num_bytes: int) -> None:
    """Is the count of bytes that do not pass through the driver."""


def _nothing() -> None:
    """Does nothing when a start fails: `start` cleans up."""


class CallChannel(Listener):
    """The pending calls of one event loop in one actor; to be used on that loop only.  A lost cluster ends them.

    explain: the error to raise for what Ray raised, by method name.  count: receives the method, and the bytes that are sent for
    it or received.
    """

    def __init__(
        self,
        actor: Any,
        name: str,
        key: str,
        explain: Callable[[BaseException, str], BaseException],
        count: Callable[..., None],
    ) -> None:
        self._actor = actor
        self._name = name
        self._key = key
        self._explain, self._count = explain, count
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._calls: dict[int, _PendingCall] = {}
        self._outbox: list[Message] = []
        self._collector: asyncio.Task[None] | None = None
        self._parked = False  # whether a `collect` waits in the actor
        listen(self)

    def cluster_lost(self, error: ClusterLostError) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.fail, error)

    async def call(self, method: str, *args: Any, deadline_s: float | None = None, **kw: Any) -> Any:
        """Sends and awaits one call."""
        check_cluster()
        payload = pack((method, args, kw, faults.current_step()))
        self._count(method, sent=len(payload))
        number = next(self._numbers)
        call = self._calls[number] = _PendingCall(method, self._loop.create_future())
        self._send((number, payload))
        timer = self._loop.call_later(deadline_s, self._expire, number, deadline_s) if deadline_s is not None else None
        try:
            return await call.future
        except asyncio.CancelledError:
            self._send((number, CANCEL))
            raise
        finally:
            self._calls.pop(number, None)
            if timer is not None:
                timer.cancel()

    def fail(self, error: BaseException) -> None:
        """Ends all pending calls because of what Ray raised."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(self._explain(error, call.method))

    def _expire(self, number: int, deadline_s: float) -> None:
        call = self._calls[number]
        if not call.future.done():
            call.future.set_exception(DeadlineError(f"{self._name}.{call.method}", deadline_s, "the method is cancelled"))
            self._send((number, CANCEL))

    def _send(self, message: Message) -> None:
        self._outbox.append(message)
        if self._collector is None or self._collector.done():
            self._collector = self._loop.create_task(self._collect())
        elif self._parked and len(self._outbox) == 1:
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Sends what came up while `collect` waits in the actor; otherwise that will carry it."""
        if self._outbox and self._parked:
            messages, self._outbox = self._outbox, []
            try:
                self._actor.deliver.remote(self._key, messages)
            except Exception as error:  # noqa: BLE001 - whatever ends the exchange ends the calls, which would hang else
                self.fail(error)

    async def _collect(self) -> None:
        while self._calls or self._outbox:
            # Those who were answered leave the table, and ask again a few turns later.
            for _ in range(_SETTLE_TURNS):
                await asyncio.sleep(0)
            messages, self._outbox = self._outbox, []
            try:
                self._parked = True
                replies = await self._actor.collect.remote(self._key, messages)
            except Exception as error:  # noqa: BLE001 - whatever ends the exchange ends the calls, which would hang else
                self.fail(error)
                return
            finally:
                self._parked = False
            for reply in replies:
                self._settle(reply)

    def _settle(self, reply: Reply) -> None:
        number, failed, payload = reply
        call = self._calls.get(number)
        if call is None or call.future.done():
            return
        self._count(call.method, received=len(payload))
        try:
            value = pickle.loads(payload)
        except Exception as error:  # noqa: BLE001 - the boundary of a process: whatever its classes raise belongs to this call
            call.future.set_exception(self._explain(error, call.method))
            return
        if failed:
            call.future.set_exception(self._explain(value, call.method))
        else:
            call.future.set_result(value)


@dataclass(slots=True)
class _PendingCall:
    method: str
    future: asyncio.Future[Any]


class ActorProcess:
    """The Ray actor; see the module docstring.  max_concurrency: methods of the object that run at the same time."""

    def __init__(self, max_concurrency: int) -> None:
        self._max_concurrency = max_concurrency
        self._context = WorkerContext()
        self._replies: defaultdict[str, _Replies] = defaultdict(_Replies)
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}

    async def identity(self) -> ProcessIdentity:
        """Returns where this process is."""
        return own_identity()

    async def prepare(self, setup: ProcessSetup) -> None:
        """Takes the environment, log file and import path, and imports the plugins."""
        self._context = setup.context
        prepare_process(setup)

    async def build(self, spec: ClassWithInitArgs) -> None:
        """Constructs the object."""
        self._object = ActorObject(self._max_concurrency)
        await self._object.build(spec, self._context)

    async def answer(self, method: str, args: tuple[Any, ...]) -> Any:
        """Runs a method of the object for another process than the driver."""
        return await self._object.run(method, args, {})

    async def linger(self) -> None:
        """Never returns: the call fails when the process dies, which wakes its caller."""
        await asyncio.Event().wait()

    async def deliver(self, key: str, messages: list[Message]) -> None:
        """Starts these calls, or cancels them; returns at once."""
        for number, payload in messages:
            place = (key, number)
            if payload != CANCEL:
                task = self._running[place] = asyncio.create_task(self._run(place, payload))
                task.add_done_callback(partial(self._running.pop, place))  # also if it is cancelled before it begins
            elif place in self._running:
                self._running[place].cancel()

    async def collect(self, key: str, messages: list[Message]) -> list[Reply]:
        """Does as `deliver`, then returns all replies there are; waits for the first."""
        await self.deliver(key, messages)
        replies = self._replies[key]
        await replies.filled.wait()
        return replies.take()

    async def _run(self, place: tuple[str, int], payload: bytes) -> None:
        key, number = place
        method = "request"
        value, failure = None, None
        try:
            method, args, kwargs, step = pickle.loads(payload)
            faults.begin_step(step)
            value = await self._object.run(method, args, kwargs)
        except RemoteError as error:
            failure = error
        except asyncio.CancelledError:
            failure = self._object.cancelled_itself(method)
        except Exception as error:  # noqa: BLE001 - the boundary of a process: it is raised at the caller's
            failure = describe_failure(error, self._context, method)
        reply = pack_reply(number, value, failure, lambda error: describe_failure(error, self._context, method))
        for _ in range(_COPIES[faults.at("replica.reply")]):
            self._replies[key].add(reply)


class _Replies:
    """The replies that one caller's event loop has not fetched yet."""

    def __init__(self) -> None:
        self.waiting: list[Reply] = []
        self.filled = asyncio.Event()

    def add(self, reply: Reply) -> None:
        self.waiting.append(reply)
        self.filled.set()

    def take(self) -> list[Reply]:
        taken, self.waiting = self.waiting, []
        self.filled.clear()
        return taken


def pack(value: Any) -> bytes:
    """Pickles a value.  What the main script or a function defines goes by value, which only the slower cloudpickle does."""
    try:
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # noqa: BLE001 - a user's object may raise anything while it is pickled; cloudpickle then says what
        payload = _MAIN
    return bytes(cloudpickle.dumps(value)) if _MAIN in payload else payload  # type: ignore[no-untyped-call]


def pack_reply(number: int, value: Any, failure: RemoteError | None, describe: Callable[[Exception], RemoteError]) -> Reply:
    """Returns the reply of a call.  describe: makes the failure of a result that cannot be pickled."""
    try:
        return number, failure is not None, pack(value if failure is None else failure)
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything while it is pickled
        return number, True, pack(describe(error))
