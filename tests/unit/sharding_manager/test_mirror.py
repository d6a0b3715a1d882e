"""Versions over connections: replicas join late, lag, damage what they have and die, and the rank goes on."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhub.engines.rollout.fake import FakeEngine
from rlhub.errors import EngineError, RlhubError
from rlhub.rollout_service.weights_folder import MirrorReader
from rlhub.sharding_manager import mirror as mirror_module
from rlhub.sharding_manager.files import SHARED_MEMORY, WeightWriter, new_in_memory
from rlhub.sharding_manager.mirror import Mirror, VersionServer
from rlhub.sharding_manager.peers import Peers
from rlhub.sharding_manager.versions import versions_in
from tests.unit.sharding_manager.test_files import engine as engine
from tests.unit.sharding_manager.test_versions import Job, flip

TIMEOUT_S = 60.0
KILLED = """
import os, signal, sys
from pathlib import Path
from rlhub.sharding_manager import mirror
mirror._receive = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # the rank waits for this process by now
mirror.Mirror(sys.argv[1], timeout_s=60.0).fetch(0)
"""


class Rank(Job):
    """A trainer's only rank, which serves its folder."""

    def __init__(self, folder: Path, *, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(folder)
        self.server = VersionServer(folder, host="127.0.0.1", rank=0, timeout_s=timeout_s)

    def new_writer(self) -> WeightWriter:
        return WeightWriter(self.train, self.folder, bucket_bytes=1 << 14, full_every=self.full_every, own_folder=True)

    def replica(self, engine: FakeEngine) -> MirrorReader:
        return MirrorReader(engine, Mirror(self.server.address, timeout_s=TIMEOUT_S), bucket_bytes=1 << 20, timeout_s=TIMEOUT_S)

    def take(self, engine: FakeEngine, replica: MirrorReader) -> int:
        """Gives a replica the newest version; returns its count of full versions that replaced deltas."""
        report = replica.place(replica.prepare(self.version))
        assert report.fingerprint == self.fingerprint and engine.version == self.version
        live = {piece.name: piece.tensor for piece in engine.live_weights()}
        assert all(torch.equal(live[name], value) for name, value in self.train.model.state_dict().items())
        return report.fallbacks


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    yield rank
    rank.server.close()
    rank.writer.close()


def test_versions_arrive_as_deltas_also_at_a_replica_that_joins_late(rank: Rank, engine: FakeEngine) -> None:
    replica = rank.replica(engine)
    for _ in range(3):
        rank.step()
        assert rank.take(engine, replica) == 0
    folder = replica._mirror.folder
    assert versions_in(folder) == [0, 1, 2] and folder.parent == SHARED_MEMORY
    late_engine = FakeEngine(engine._setup)
    late = rank.replica(late_engine)
    assert rank.take(late_engine, late) == 0
    for _ in range(2):
        rank.step()
    assert rank.take(engine, replica) == rank.take(late_engine, late) == 0, "they missed a version"
    assert versions_in(folder) == [4], "which is full"
    for one in (replica, late):
        one.close()
    assert not folder.exists()


def test_files_travel_by_the_devices() -> None:
    assert [mirror_module.carrier(*pair) for pair in (("", ""), ("a", ""), ("", "b"))] == ["gloo"] * 3
    assert (mirror_module.carrier("a", "b"), mirror_module.carrier("a", "a")) == ("nccl", "link")
    assert mirror_module.device_identity(torch.device("cpu")) == ""


@pytest.mark.parametrize("here", ["a", "b"])
def test_a_replica_of_the_ranks_gpu_links_its_files_and_others_get_them_in_chunks(
    rank: Rank, engine: FakeEngine, here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both say they have GPUs, and copy on the CPU; no chunk is larger than it may be."""
    sizes, exchange = [], Peers.exchange
    monkeypatch.setattr(mirror_module, "device_identity", lambda device: "a")
    monkeypatch.setattr(mirror_module, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(mirror_module, "new_in_memory", lambda: new_in_memory(tmp_path))

    def counted(peers: Peers, sends: Any, receives: Any, **options: Any) -> Any:
        sizes.extend(tensor.nbytes for _, tensor in (*sends, *receives))
        return exchange(peers, sends, receives, **options)

    monkeypatch.setattr(Peers, "exchange", counted)
    replica = rank.replica(engine)
    replica._mirror._identity = here
    for _ in range(3):
        rank.step()
        assert rank.take(engine, replica) == 0
    assert (max(sizes, default=0), len(sizes) > 10) == ((0, False) if here == "a" else (1000, True))
    replica.close()


def test_a_file_that_cannot_be_linked_names_the_remedy(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    rank.step()
    monkeypatch.setattr(mirror_module, "device_identity", lambda device: "a")
    monkeypatch.setattr("os.link", lambda *names: (_ for _ in ()).throw(OSError("Invalid cross-device link")))
    mirror = Mirror(rank.server.address, timeout_s=TIMEOUT_S)
    with pytest.raises(EngineError, match=r"cannot be linked \(Invalid cross-device link\): give their containers one /dev/shm"):
        mirror.fetch(0)
    mirror.close()


def test_a_version_that_arrives_damaged_comes_again_in_full(rank: Rank, engine: FakeEngine) -> None:
    replica = rank.replica(engine)
    rank.step()
    rank.take(engine, replica)
    rank.step()
    replica._mirror.fetch(1)
    flip(rank)  # only the file that a delta is sent from: what is written in full is whole
    assert rank.take(engine, replica) == 1
    rank.step()
    assert rank.take(engine, replica) == 1
    replica.close()


def test_a_killed_replica_costs_the_rank_nothing(rank: Rank, engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    """SIGKILL once the rank has answered; the next version is written, and the others get it."""
    rank.step()
    child = subprocess.Popen([sys.executable, "-c", KILLED, rank.server.address])
    assert child.wait(500) == -signal.SIGKILL
    replica = rank.replica(engine)
    assert rank.take(engine, replica) == 0
    rank.step()
    assert rank.take(engine, replica) == 0
    replica.close()


def test_one_that_connects_and_is_silent_holds_up_nobody(rank: Rank, engine: FakeEngine) -> None:
    place = rank.server.address.removeprefix(mirror_module.SCHEME).partition("/")[0]
    host, _, port = place.rpartition(":")
    with socket.create_connection((host, int(port))):
        rank.step()
        replica = rank.replica(engine)
        assert rank.take(engine, replica) == 0
    replica.close()


def test_without_the_token_nothing_is_sent(rank: Rank) -> None:
    rank.step()
    wrong = Mirror(rank.server.address[:-1] + ("0" if rank.server.address[-1] != "0" else "1"), timeout_s=TIMEOUT_S)
    with pytest.raises(EngineError, match="version 0 of the weights is not at 127.0.0.1"):
        wrong.fetch(0)
    wrong.close()


def test_a_rank_that_is_gone_is_named_and_the_engine_keeps_its_weights(rank: Rank, engine: FakeEngine) -> None:
    replica = rank.replica(engine)
    rank.step()
    rank.take(engine, replica)
    rank.server.close()
    with pytest.raises(EngineError, match="version 1 of the weights cannot be had from 127.0.0.1:"):
        replica.prepare(1)
    assert engine.version == 0
    replica.close()


def test_a_rank_that_dies_while_it_sends_leaves_no_half_version(
    rank: Rank,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = rank.replica(engine)
    rank.step()
    rank.take(engine, replica)
    rank.step()
    send = mirror_module._send

    def half(paths: list[Path], peer: mirror_module.Peer) -> None:
        send(paths[:1], peer)

    monkeypatch.setattr(mirror_module, "_send", half)
    with pytest.raises(RlhubError):
        replica.prepare(1)
    assert versions_in(replica._mirror.folder) == [0] and engine.version == 0
    monkeypatch.undo()
    assert rank.take(engine, replica) == 0
    replica.close()


def test_a_resumed_trainer_serves_its_own_versions_of_the_same_numbers(rank: Rank, engine: FakeEngine, tmp_path: Path) -> None:
    replica = rank.replica(engine)
    for _ in range(3):
        rank.step()
        rank.take(engine, replica)
    rank.writer.close()
    for path in tmp_path.glob("version-*"):
        shutil.rmtree(path)
    rank.writer, rank.version = rank.new_writer(), 0
    rank.train.perturb(5)
    for _ in range(2):
        rank.step()
        assert rank.take(engine, replica) == 0
    replica.close()


def test_the_engines_dtypes_reach_the_rank(rank: Rank, engine: FakeEngine) -> None:
    replica = rank.replica(engine)
    for _ in range(2):
        rank.step()
        rank.take(engine, replica)
    (noted,) = rank.folder.glob("dtypes-*.json")
    assert set(json.loads(noted.read_text()).values()) == {"bfloat16"}
    replica.close()


def test_many_replicas_at_once(rank: Rank, engine: FakeEngine) -> None:
    rank.step()
    engines = [FakeEngine(engine._setup) for _ in range(4)]
    replicas = [rank.replica(one) for one in engines]
    threads = [threading.Thread(target=rank.take, args=pair) for pair in zip(engines, replicas, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.version for one in engines] == [0] * 4
    for one in replicas:
        one.close()
