"""The processes of a transfer: point-to-point messages over a process group, with deadlines and named peers.

The group is either the job's own, for colocated engines, or a new one that two separate pools join at an address.  Every wait
ends: a peer that died or does not answer becomes a typed error that names it.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, but not in an __all__

from rlhub.errors import DeadlineError, WorkerDiedError

Post = tuple[int, Tensor]
"""The rank of a peer, and the tensor to send or to receive into."""

MESSAGES, SMALL_COLLECTIVES = 0, 1  # tags


@dataclass(slots=True, kw_only=True)
class PendingMessage:
    """A message that travels to or from `peer`; its tensor must not be touched before `wait` returns."""

    work: dist.Work
    peer: int
    receiving: bool
    peers: Peers

    def wait(self) -> None:
        try:
            self.work.wait(timedelta(seconds=self.peers.timeout_s))
        except RuntimeError as error:
            raise self.peers.lost(self.peer, self.receiving, error) from error


class Peers:
    """The process group of a transfer and this process's rank in it.  labels: the name of each rank in errors."""

    def __init__(
        self, group: dist.ProcessGroup, *, rank: int, size: int, device: torch.device, timeout_s: float, labels: Sequence[str]
    ) -> None:
        self.group, self.rank, self.size, self.device, self.timeout_s = group, rank, size, device, timeout_s
        self.labels = list(labels)

    @classmethod
    def of_job(cls, device: torch.device, timeout_s: float) -> Peers | None:
        """Returns the peers of the job's default group, or None if this process is alone."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        rank, size = dist.get_rank(), dist.get_world_size()
        group = dist.group.WORLD
        assert group is not None
        _connect_devices(group, device)
        return cls(group, rank=rank, size=size, device=device, timeout_s=timeout_s, labels=["worker"] * size)

    @classmethod
    def join(cls, address: str, port: int, *, rank: int, size: int, device: torch.device, timeout_s: float) -> Peers:
        """Joins a new group of `size` processes at the store that rank 0 serves at the address; blocks until all have joined."""
        timeout = timedelta(seconds=timeout_s)
        name = f"weight transfer at {address}:{port}, rank {rank} of {size}"
        try:
            store = TCPStore(address, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=True)
            group = dist.ProcessGroup(store, rank, size)
            gloo = dist.ProcessGroupGloo(PrefixStore("weights", store), rank, size, timeout)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            if device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timeout
                nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)
                group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
            _connect_devices(group, device)
        except (RuntimeError, ValueError) as error:  # torch's store and backend errors are RuntimeErrors
            raise DeadlineError(name, timeout_s, f"not all {size} processes joined: {error}") from error
        peers = cls(group, rank=rank, size=size, device=device, timeout_s=timeout_s, labels=["peer"] * size)
        peers.store = store  # the group needs it as long as it lives
        return peers

    store: TCPStore | None = None

    # Messages

    def exchange(self, sends: Sequence[Post], receives: Sequence[Post], *, tag: int = MESSAGES) -> list[PendingMessage]:
        """Starts all messages; those of one pair and tag arrive in the order in which they were sent."""
        if self.device.type == "cuda" and any(tensor.is_cuda for _, tensor in (*sends, *receives)):
            return self._exchange_at_once(sends, receives)
        return [self._start(peer, tensor, tag, receiving=True) for peer, tensor in receives] + [
            self._start(peer, tensor, tag, receiving=False) for peer, tensor in sends
        ]

    def _start(self, peer: int, tensor: Tensor, tag: int, *, receiving: bool) -> PendingMessage:
        try:
            work = self.group.recv([tensor], peer, tag) if receiving else self.group.send([tensor], peer, tag)
        except RuntimeError as error:
            raise self.lost(peer, receiving, error) from error
        return PendingMessage(work=work, peer=peer, receiving=receiving, peers=self)

    def _exchange_at_once(self, sends: Sequence[Post], receives: Sequence[Post]) -> list[PendingMessage]:
        """Starts the messages as one coalesced batch, because NCCL runs messages in order, and single ones could wait for each
        other."""
        self.group._start_coalescing(self.device)
        for peer, tensor in receives:
            self.group.recv([tensor], peer, 0)
        for peer, tensor in sends:
            self.group.send([tensor], peer, 0)
        work = self.group._end_coalescing(self.device)
        peer = (*receives, *sends)[0][0]
        return [PendingMessage(work=work, peer=peer, receiving=bool(receives), peers=self)]

    def lost(self, peer: int, receiving: bool, error: BaseException) -> WorkerDiedError | DeadlineError:
        """Returns the typed error for a message that did not arrive."""
        what = "from" if receiving else "to"
        label = self.labels[peer]
        if "imed out" in str(error):
            return DeadlineError(
                f"weights {what} {label} rank {peer}", self.timeout_s, "is that process still running, and on the same update?"
            )
        return WorkerDiedError(
            f"the connection {what} this process broke while weights travelled: {error}",
            role=label,
            rank=peer,
            node=socket.gethostname(),
        )

    # Small collectives, on the CPU

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """Returns every rank's CPU tensor of the same size, in the order of the ranks.

        Each rank sends to each other rank, so that an error names the peer that is missing.
        """
        out = [values if rank == self.rank else torch.empty_like(values) for rank in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends, receives = [(rank, values) for rank in others], [(rank, out[rank]) for rank in others]
        for pending in self.exchange(sends, receives, tag=SMALL_COLLECTIVES):
            pending.wait()
        return out

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every rank's bytes, of any length, in the order of the ranks."""
        lengths = [int(length) for length in self.all_gather(torch.tensor([len(data)]))]
        padded = torch.zeros(max(max(lengths), 1), dtype=torch.uint8)
        if data:
            padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return [bytes(rows[:n].numpy()) for rows, n in zip(self.all_gather(padded), lengths, strict=True)]

    def minimum(self, value: int) -> int:
        """Returns the smallest value of all ranks."""
        return min(int(other) for other in self.all_gather(torch.tensor([value])))

    def close(self) -> None:
        """Closes the connections; peers that wait for this process notice it.

        A kernel of NCCL's that waits for a peer would keep the device busy, so such a group that was joined is aborted.
        """
        if self.store is not None and self.device.type == "cuda":
            self.group.abort()
        del self.group


def _connect_devices(group: dist.ProcessGroup, device: torch.device) -> None:
    """Connects the group's devices; every rank calls it once.

    NCCL would otherwise connect them with the first message and wait for all ranks then, although some have nothing to send or
    receive.
    """
    if device.type != "cpu":
        group.allreduce([torch.zeros(1, device=device)]).wait()
