"""`World`: the processes of a run in which every rank runs the control program (trainer.controller=multi).

Each process takes the same steps in the same order, so what one of them has computed reaches the others by a collective, without
a process in the middle: `gather` brings a value of each process to all, `first` the result of one function on rank 0, `move`
pieces of bytes from one process to another.  The messages travel over a gloo group of their own, whatever groups engines form.

A store beside the group has what each process last reported.  Where a collective breaks, or does not end in time, it says which
process failed, and with what error, which ended without a word, and which is behind the others: every process then raises the
same typed error, after the single program, multiple data style of a run under torchrun.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]  # public, not in an __all__

from rlhub.errors import DeadlineError, RlhubError, WorkerDiedError
from rlhub.single_controller.calls import GRACE_S, Deadline, lives
from rlhub.single_controller.invoke import describe_failure
from rlhub.single_controller.worker import WorkerContext

T = TypeVar("T")

FRAME_BYTES = 1024
"""Messages up to this size travel in one collective; of longer ones the rest follows in a second."""
HEADER_BYTES = 8
LOOK_S = 1.0
"""How often a wait looks for the failure of another process."""
BEAT_S = 0.5
"""How often a process reports that it lives."""
BEATS_MISSED = 8
"""A process of another machine counts as dead when the others have reported so often meanwhile."""
LEAVE_S = 10.0
"""Longest wait of the process that has the store for the others to read it for the last time."""
NO_LIMIT = timedelta(days=365)
FAILURE = "failure"
SHOWN = 160
"""Characters of a message of gloo's, which ends in advice of a general kind."""


@dataclass(slots=True, kw_only=True, frozen=True)
class ProcessPlace:
    """The place of a process in the world, as torchrun gives it.

    rank, size: of the world.  local_rank, local_size: of the processes of this machine.  address, port: where rank 0 listens.
    store_is_up: another process listens there already, as torchrun's agent does.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: str = "127.0.0.1"
    address: str = "127.0.0.1"
    port: int = 0
    store_is_up: bool = False


@dataclass(slots=True, kw_only=True, frozen=True)
class Beat:
    """The last report of a process.  number: of its reports.  collectives: how many it has begun, and the last one's name."""

    node: str
    pid: int
    number: int = 0
    collectives: int = 0
    name: str = ""


class World:
    """See the module docstring.  place: that of this process.  start_s: the longest wait for all processes to come."""

    def __init__(self, place: ProcessPlace, start_s: float) -> None:
        self.place, self.rank, self.size = place, place.rank, place.size
        self._beat = Beat(node=place.node, pid=os.getpid())
        self._store: Any = None
        self._host = self._beat
        self._group: Any = None
        self._over = threading.Event()
        if self.size == 1:
            return
        if place.address.startswith("127.") or place.address == "localhost":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve to loopback
        try:
            host = place.rank == 0 and not place.store_is_up
            limit = timedelta(seconds=start_s)
            store = TCPStore(place.address, place.port, is_master=host, timeout=limit, wait_for_workers=False)
            self._store = PrefixStore("rlhub", store)
            self._report()
            self._store.wait([_beat_key(rank) for rank in range(self.size)], limit)
            self._host = self._beats()[0]
        except RuntimeError as error:
            raise DeadlineError("the start of all ranks", start_s, f"{place.address}:{place.port}: {error}") from error
        self._group = ProcessGroupGloo(PrefixStore("rlhub/group", store), self.rank, self.size, timeout=NO_LIMIT)
        threading.Thread(target=self._keep_reporting, name="world-beat", daemon=True).start()

    # -- collectives -------------------------------------------------------------------------------------------------------

    def gather(self, value: T, name: str, deadline: Deadline | None = None) -> list[T]:
        """Returns the value of every process, by rank; every process calls it.  What each gets is a copy, its own too.

        name: of the wait.  Raises the error with which another process failed; WorkerDiedError; DeadlineError, which names the
        processes that have not come.
        """
        message = pickle.dumps(value, protocol=5)
        if self.size == 1:
            return [pickle.loads(message)]
        self._note(name)
        message = len(message).to_bytes(HEADER_BYTES, "little") + message
        frames = self._all_gather(message[:FRAME_BYTES], FRAME_BYTES, name, deadline)
        sizes = [HEADER_BYTES + int.from_bytes(frame[:HEADER_BYTES], "little") for frame in frames]
        if max(sizes) > FRAME_BYTES:
            rests = self._all_gather(message[FRAME_BYTES:], max(sizes) - FRAME_BYTES, name, deadline)
            frames = [frame + rest for frame, rest in zip(frames, rests, strict=True)]
        return [pickle.loads(frame[HEADER_BYTES:size]) for frame, size in zip(frames, sizes, strict=True)]

    def first(self, function: Callable[[], T], name: str) -> T:
        """Returns on every process the result of a function that runs on rank 0 alone, or raises its error on all."""
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = function(), None
            except Exception as error:  # noqa: BLE001  raised below, on every process
                outcome = None, error
        result, failure = self.gather(outcome, name)[0]
        if failure is not None:
            raise failure if self.rank else (outcome[1] or failure)
        found: T = result
        return found

    def move(self, out: Sequence[tuple[int, int, Tensor]], into: Sequence[tuple[int, int, int]], name: str) -> list[Tensor]:
        """Sends pieces (rank, tag, uint8 (bytes,)) and returns those that came, asked for as (rank, tag, bytes)."""
        self._note(name)
        buffers = [torch.empty(size, dtype=torch.uint8) for _, _, size in into]
        works = [self._group.recv([buffer], rank, tag) for buffer, (rank, tag, _) in zip(buffers, into, strict=True)]
        works += [self._group.send([piece], rank, tag) for rank, tag, piece in out]
        for work in works:
            self._wait(work, name, None)
        return buffers

    def _all_gather(self, content: bytes, size: int, name: str, deadline: Deadline | None) -> list[bytes]:
        """Gathers so many bytes of each process; shorter contents are padded."""
        own = torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(self._group.allgather([parts], [own]), name, deadline)
        return [part.numpy().tobytes() for part in parts]

    def _wait(self, work: Any, name: str, deadline: Deadline | None) -> None:
        ends = float("inf") if deadline is None else time.monotonic() + deadline.seconds
        while True:
            try:
                work.wait(timedelta(seconds=LOOK_S))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise self._explained(name, error) from error
            if (failure := self._failure()) is not None:
                raise failure
            if time.monotonic() > ends:
                assert deadline is not None
                raise deadline.error(name, self._behind())

    # -- what the processes report -----------------------------------------------------------------------------------------

    def fail(self, error: Exception, role: str = "rank") -> None:
        """Tells the other processes why this one ends; the first that does is what all raise."""
        if self._store is None or self._over.is_set():
            return
        context = WorkerContext(role=role, rank=self.rank, node=self.place.node)
        described = error if isinstance(error, RlhubError) else describe_failure(error, context, "the training loop").error
        with suppress(RuntimeError):  # the store ended with rank 0
            self._store.compare_set(FAILURE, "", pickle.dumps(described).hex())

    def close(self) -> None:
        """Leaves the world.  The process that has the store waits until the others have left."""
        if self._store is None or self._over.is_set():
            return
        self._over.set()
        with suppress(RuntimeError):
            self._store.add("left", 1)
            ends = time.monotonic() + LEAVE_S
            while self.rank == 0 and self._store.add("left", 0) < self.size and time.monotonic() < ends:
                if all(not self._is_here(beat) or not lives(beat.pid) for beat in self._others()):
                    break
                time.sleep(0.05)
        self._group = None

    def _note(self, name: str) -> None:
        self._beat = replace(self._beat, collectives=self._beat.collectives + 1, name=name)

    def _report(self, number: int = 0) -> None:
        beat = self._beat
        self._store.set(_beat_key(self.rank), f"{beat.node} {beat.pid} {number} {beat.collectives} {beat.name}")

    def _keep_reporting(self) -> None:
        with suppress(RuntimeError):  # rank 0 has ended, and the store with it: the next collective says so
            for number in itertools.count(1):
                if self._over.wait(BEAT_S):
                    return
                self._report(number)

    def _beats(self) -> dict[int, Beat]:
        texts = self._store.multi_get([_beat_key(rank) for rank in range(self.size)])
        parts = [bytes(text).decode().split(" ", 4) for text in texts]
        return {
            rank: Beat(node=node, pid=int(pid), number=int(number), collectives=int(done), name=name)
            for rank, (node, pid, number, done, name) in enumerate(parts)
        }

    def _others(self) -> list[Beat]:
        return [beat for rank, beat in self._beats().items() if rank != self.rank]

    def _is_here(self, beat: Beat) -> bool:
        return beat.node == self.place.node

    def _failure(self) -> Exception | None:
        """Returns the error with which another process has failed, if one has said so."""
        try:
            if not self._store.check([FAILURE]):
                return None
            error: Exception = pickle.loads(bytes.fromhex(self._store.get(FAILURE).decode()))
        except RuntimeError as error_of_store:
            return self._host_died(error_of_store)
        return error

    def _explained(self, name: str, error: RuntimeError) -> Exception:
        """Returns why a collective broke: the failure of another process, or its end."""
        try:
            before = self._beats()
            ends = time.monotonic() + GRACE_S + BEATS_MISSED * BEAT_S
            while time.monotonic() < ends:
                if (failure := self._failure()) is not None:
                    return failure
                now = self._beats()
                for rank, beat in now.items():
                    if self._is_here(beat) and not lives(beat.pid):
                        return _died(rank, beat, str(error))
                silent = [rank for rank, beat in now.items() if beat.number == before[rank].number]
                newest = max(beat.number - before[rank].number for rank, beat in now.items())
                if silent and newest >= BEATS_MISSED and not self._is_here(now[silent[0]]):
                    return _died(silent[0], now[silent[0]], str(error))
                time.sleep(BEAT_S / 5)
        except RuntimeError as lost:
            return self._host_died(lost)
        return DeadlineError(name, GRACE_S, f"the connection to another rank broke: {error}")

    def _host_died(self, error: RuntimeError) -> WorkerDiedError:
        """Returns the death of rank 0, with which the store has ended."""
        self._over.set()
        return _died(0, self._host, f"its store does not answer: {str(error).splitlines()[0]}")

    def _behind(self) -> str:
        """Returns a sentence on the processes that others wait for."""
        try:
            beats = self._beats()
        except RuntimeError:
            return "rank 0 does not answer"
        newest = max(beat.collectives for beat in beats.values())
        late = [
            f"rank {rank} on {beat.node} (process {beat.pid}, after {beat.name})"
            for rank, beat in beats.items()
            if beat.collectives < newest
        ]
        return f"still running: {', '.join(late) or 'none'}"


def _died(rank: int, beat: Beat, why: str) -> WorkerDiedError:
    doing = f" while or before it ran {beat.name}" if beat.name else ""
    return WorkerDiedError(
        f"process {beat.pid} died{doing}: {' '.join(why.split())[:SHOWN]}", role="loop", rank=rank, node=beat.node
    )


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


_current: ContextVar[World | None] = ContextVar("rlhub_world", default=None)


@contextmanager
def joined(place: ProcessPlace, start_s: float) -> Iterator[World]:
    """Joins the world for the block, which every process runs.  An error that leaves the block is told to the others."""
    world = World(place, start_s)
    token = _current.set(world)
    try:
        yield world
    except BaseException as error:
        world.fail(error if isinstance(error, Exception) else RlhubError(f"it was interrupted ({type(error).__name__})"))
        raise
    finally:
        _current.reset(token)
        world.close()


def current_world() -> World | None:
    """Returns the world that this process has joined; None where one driver calls the ranks."""
    return _current.get()


def place_of(environment: Mapping[str, str]) -> ProcessPlace | None:
    """Returns the place that a launcher such as torchrun has given this process by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
    None where these are not set."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return ProcessPlace(
        rank=rank,
        size=size,
        local_rank=int(environment.get("LOCAL_RANK", rank)),
        local_size=int(environment.get("LOCAL_WORLD_SIZE", size)),
        node=_address_towards(environment["MASTER_ADDR"]),
        address=environment["MASTER_ADDR"],
        port=int(environment["MASTER_PORT"]),
        store_is_up=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _address_towards(host: str) -> str:
    """Returns the address of this machine that `host` can reach."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing
        return str(probe.getsockname()[0])
