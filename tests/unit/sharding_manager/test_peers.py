"""Peers whose messages travel between devices: the group connects them before any rank has to send."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhub.sharding_manager import peers
from rlhub.sharding_manager.peers import Peers

META = torch.device("meta")


class FakeGroup:
    """Notes the calls of a process group."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def allreduce(self, tensors: list[torch.Tensor]) -> SimpleNamespace:
        self.calls.append(("allreduce", tensors[0].device))
        return SimpleNamespace(wait=lambda: self.calls.append("wait"))

    def recv(self, tensors: list[Any], peer: int, tag: int) -> None:
        self.calls.append(("recv", peer))

    def send(self, tensors: list[Any], peer: int, tag: int) -> None:
        self.calls.append(("send", peer))

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append("start")

    def _end_coalescing(self, device: torch.device) -> SimpleNamespace:
        self.calls.append("end")
        return SimpleNamespace(wait=lambda timeout: None)


def test_the_ranks_of_a_job_connect_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeGroup()
    fakes: dict[str, Any] = {"is_initialized": lambda: True, "get_world_size": lambda: 2, "get_rank": lambda: 1}
    monkeypatch.setattr(peers, "dist", SimpleNamespace(**fakes, group=SimpleNamespace(WORLD=group)))
    assert Peers.of_job(torch.device("cpu"), 5.0) is not None and group.calls == []
    assert Peers.of_job(META, 5.0) is not None
    assert group.calls == [("allreduce", META), "wait"]


def test_the_processes_of_two_pools_connect_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[tuple[object, torch.device]] = []
    monkeypatch.setattr(peers, "_connect_devices", lambda group, device: met.append((group, device)))
    joined = Peers.join("127.0.0.1", 0, rank=0, size=1, device=META, timeout_s=60.0)  # at any port that is free
    assert met == [(joined.group, META)], "not every rank has something to send in the first transfer"
    joined.close()


def test_messages_between_devices_go_as_one_batch() -> None:
    group = FakeGroup()
    joined = Peers(group, rank=0, size=3, device=torch.device("cuda"), timeout_s=5.0, labels=["peer"] * 3)  # type: ignore[arg-type]
    on_device: Any = SimpleNamespace(is_cuda=True)
    (pending,) = joined.exchange([(1, on_device)], [(2, on_device)])
    assert group.calls == ["start", ("recv", 2), ("send", 1), "end"]
    pending.wait()
