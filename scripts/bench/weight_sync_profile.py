"""Where a weight sync's time goes on every rank, next to what this machine needs for the same bytes with nothing around them.

`weight_sync.py --profile` calls it.  The parts of a sync are timed inside it (a part within another is counted once); the bare
parts run right after, on all ranks at the same moment, for they share one memory.  Messages travel while a rank copies and
compares, so the sum of its bare parts is what a sync needs of one core that does everything, and the limit of CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.protocol.weights.fingerprint import digests
from rlhub.sharding_manager import route as routes
from rlhub.sharding_manager.local_pieces import LocalPieces
from rlhub.sharding_manager.peers import Peers, PendingMessage
from rlhub.sharding_manager.route import Route
from rlhub.sharding_manager.schedule import COPY_ELEMENTS

COPY = "copies inside the process"
PACK = "filling buffers"
UNPACK = "emptying buffers"
SOURCE = "fingerprints of what leaves"
READ_BACK = "fingerprints of what arrived"
STRIDED = "gathering strided weights for them"
SOCKETS = "messages through the process group"
WAIT = "waiting for the other ranks"
POSTING = "posting messages, exchanging fingerprints"
STEPS = "the plan's steps in Python"
PARTS = (COPY, PACK, UNPACK, SOURCE, READ_BACK, STRIDED, SOCKETS, WAIT, POSTING, STEPS)
MESSAGE_BYTES = 8 << 20
COMPARING = "comparing"
MB = 1e6


@dataclass(slots=True)
class Spent:
    wall_s: float = 0.0
    cpu_s: float = 0.0

    @classmethod
    def now(cls) -> Spent:
        return cls(time.perf_counter(), time.process_time())

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)


@dataclass(slots=True)
class Stopwatch:
    """Adds up time by part, without that of the parts inside it."""

    spent: dict[str, Spent] = field(default_factory=dict)
    inside: list[str] = field(default_factory=list)
    _since: Spent = field(default_factory=Spent.now)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self.inside.append(name)
        try:
            yield
        finally:
            self._turn()
            self.inside.pop()

    def _turn(self) -> None:
        """Gives the time since the last turn to the innermost part."""
        now = Spent.now()
        if self.inside:
            self.spent[self.inside[-1]] = self.spent.get(self.inside[-1], Spent()) + (now - self._since)
        self._since = now


@contextmanager
def watched(watch: Stopwatch) -> Iterator[None]:
    """Times what a sync calls as the part it belongs to."""

    def around(owner: Any, attribute: str, name: str, at_end: str = "", only: str = "") -> None:
        """at_end: another name for calls from inside the final comparison.  only: calls from inside that part belong to it."""
        inner = getattr(owner, attribute)

        def timed(*arguments: Any, **keywords: Any) -> Any:
            outer = watch.inside[-1] if watch.inside else ""
            with watch.part(outer if outer == only else at_end if at_end and COMPARING in watch.inside else name):
                return inner(*arguments, **keywords)

        patches.enter_context(mock.patch.object(owner, attribute, timed))

    with ExitStack() as patches:
        around(routes, "_copy_block", COPY)
        around(LocalPieces, "read", PACK, only=COPY)
        around(LocalPieces, "write", UNPACK, only=COPY)
        around(LocalPieces, "contiguous", STRIDED)
        around(routes, "digests", SOURCE, at_end=READ_BACK)
        around(Route, "_compare", COMPARING)
        around(PendingMessage, "wait", WAIT)
        around(Peers, "exchange", POSTING)
        yield


def profiled(sync: Callable[[], None]) -> dict[str, Spent]:
    """Returns the parts of one sync on this rank."""
    watch = Stopwatch()
    with watched(watch), watch.part(STEPS):
        sync()
    watch.spent[STEPS] += watch.spent.pop(COMPARING, Spent())
    return watch.spent


# The same bytes with nothing around them


@dataclass(slots=True, kw_only=True)
class Bare:
    """The bytes of a rank's part of the plan, and how long this machine takes for them."""

    copied: int
    sent: dict[int, int]
    received: dict[int, int]

    @classmethod
    def of(cls, route: Route) -> Bare:
        plan = route.plan
        count = lambda by_peer: {peer: sum(t.num_bytes for t in transfers) for peer, transfers in by_peer.items()}  # noqa: E731
        return cls(copied=sum(t.num_bytes for t in plan.copies), sent=count(plan.sent), received=count(plan.received))

    def bytes(self) -> dict[str, int]:
        sent, received = sum(self.sent.values()), sum(self.received.values())
        return {
            COPY: self.copied,
            SOURCE: self.copied + sent,
            READ_BACK: self.copied + received,
            SOCKETS: sent + received,
        }

    def calls(self, group: dist.ProcessGroup) -> dict[str, Callable[[], object]]:
        """Returns the bare parts; every rank runs the same ones, in this order."""
        sizes = self.bytes()
        memory, other = (torch.ones(max(sizes.values()), dtype=torch.uint8) for _ in range(2))
        block = torch.ones(4 * COPY_ELEMENTS["cpu"], dtype=torch.uint8)
        return {
            COPY: lambda: other[: sizes[COPY]].copy_(memory[: sizes[COPY]]),
            SOURCE: lambda: digests(block[: len(part)] for part in _split(memory, sizes[SOURCE], len(block))),
            READ_BACK: lambda: digests(_split(memory, sizes[READ_BACK], len(block))),
            SOCKETS: lambda: self._sockets(group, memory, other),
        }

    def _sockets(self, group: dist.ProcessGroup, memory: Tensor, other: Tensor) -> None:
        """Sends and receives the same bytes over gloo, in messages of which two travel at once."""
        queues = [(True, peer, list(_split(memory, size, MESSAGE_BYTES))) for peer, size in self.sent.items()]
        queues += [(False, peer, list(_split(other, size, MESSAGE_BYTES))) for peer, size in self.received.items()]
        in_flight: list[list[dist.Work]] = []
        for number in range(max((len(parts) for _, _, parts in queues), default=0)):
            in_flight.append(
                [
                    (group.send if sends else group.recv)([parts[number]], peer, 0)
                    for sends, peer, parts in queues
                    if number < len(parts)
                ]
            )
            for work in in_flight.pop(0) if len(in_flight) > 1 else ():
                work.wait()
        for work in (work for round_ in in_flight for work in round_):
            work.wait()


def _split(memory: Tensor, num_bytes: int, size: int) -> Sequence[Tensor]:
    return torch.split(memory[:num_bytes], size) if num_bytes else ()


# All ranks


@dataclass(slots=True, kw_only=True)
class RankProfile:
    """One rank: parts and bare parts of the repeat in which the slowest rank was fastest, and bytes."""

    parts: dict[str, Spent]
    bare: dict[str, Spent]
    bytes: dict[str, int]


def profile(sync: Callable[[], None], route: Route, group: dist.ProcessGroup, repeats: int) -> list[RankProfile]:
    """Returns every rank's profile; every rank calls it."""
    bare = Bare.of(route)
    parts = _best(lambda: profiled(sync), group, repeats)
    found = {}
    for name, call in bare.calls(group).items():
        found[name] = _best(lambda call=call, name=name: {name: _timed(call)}, group, repeats)[name]  # type: ignore[misc]
    mine = RankProfile(parts=parts, bare=found, bytes=bare.bytes())
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return everyone


def _timed(call: Callable[[], object]) -> Spent:
    start = Spent.now()
    call()
    return Spent.now() - start


def _best(call: Callable[[], dict[str, Spent]], group: dist.ProcessGroup, repeats: int) -> dict[str, Spent]:
    """Returns the parts of the repeat in which the slowest rank was fastest."""
    best, least = {}, float("inf")
    for _ in range(repeats):
        dist.barrier(group=group)
        spent = call()
        slowest = torch.tensor(sum(part.wall_s for part in spent.values()), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        if float(slowest) < least:
            best, least = spent, float(slowest)
    return best


def show(ranks: Sequence[RankProfile], copy_wall_s: float, copy_cpu_s: float) -> None:
    """Prints the profiles.  copy_*_s: of the plain copy of what each engine needs, on all ranks."""
    columns = f"{'MB':>8}{'wall s':>9}{'share':>7}{'CPU s':>9}{'bare wall':>11}{'CPU':>9}"
    for number, rank in enumerate(ranks):
        print(f"  rank {number:<38}{columns}")
        for name in PARTS:
            _show_part(rank, name)
        total, limit = total_of(rank), limit_of(rank)
        print(f"    {'in all':47}{total.wall_s:9.3f}{'':7}{total.cpu_s:9.3f}{limit.wall_s:11.3f}{limit.cpu_s:9.3f}")
    totals, limits = [total_of(rank) for rank in ranks], [limit_of(rank) for rank in ranks]
    wall_s, least_wall_s = max(spent.wall_s for spent in totals), max(spent.wall_s for spent in limits)
    print(_verdict("wall, slowest rank", copy_wall_s, least_wall_s, wall_s))
    print(_verdict("CPU, all ranks", copy_cpu_s, _sum(limits).cpu_s, _sum(totals).cpu_s), flush=True)


def _show_part(rank: RankProfile, name: str) -> None:
    part, bare, total = rank.parts.get(name), rank.bare.get(name), total_of(rank)
    size = rank.bytes.get(name, 0)
    if part is None and not size:
        return
    spent = f"{part.wall_s:9.3f}{part.wall_s / total.wall_s:7.0%}{part.cpu_s:9.3f}" if part else " " * 25
    alone = f"{bare.wall_s:11.3f}{bare.cpu_s:9.3f}" if bare and size else ""
    print(f"    {name:39}{f'{size / MB:.0f}' if size else '':>8}{spent}{alone}")


def _verdict(what: str, copy_s: float, limit_s: float, sync_s: float) -> str:
    return (
        f"  {what}: plain copy {copy_s:.3f} s; limit, the bare parts {limit_s:.3f} s = {copy_s / limit_s:.2f}x the copy's rate; "
        f"sync {sync_s:.3f} s = {sync_s / limit_s:.2f} times the limit, {copy_s / sync_s:.2f}x the copy's rate"
    )


def total_of(rank: RankProfile) -> Spent:
    return _sum(rank.parts.values())


def limit_of(rank: RankProfile) -> Spent:
    """Returns the sum of what a sync cannot leave out."""
    return _sum(rank.bare.values())


def _sum(spent: Iterable[Spent]) -> Spent:
    return sum(spent, Spent())
