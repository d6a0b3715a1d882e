"""What the ranks of test_reshard.py run: training engines and rollout engines, and weights that move between them.

A process keeps its engines from call to call, so that building them is paid for once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from rlhub.config.sections.rollout import RolloutConfig
from rlhub.config.sections.training import FSDPConfig, ModelConfig
from rlhub.engines.rollout.base import RolloutEngine, SamplingParams
from rlhub.engines.rollout.registry import RolloutSetup, build_rollout_engine
from rlhub.engines.training.collectives import ensure_process_group
from rlhub.engines.training.fsdp.engine import FSDPEngine
from rlhub.errors import RlhubError, WeightMismatchError
from rlhub.protocol.weights.pieces import take
from rlhub.rollout_service.weights_folder import folder_reader
from rlhub.sharding_manager import schedule
from rlhub.sharding_manager.files import WeightWriter
from rlhub.sharding_manager.local_pieces import LocalPieces
from rlhub.sharding_manager.manager import ShardingManager
from rlhub.sharding_manager.mirror import VersionServer
from rlhub.sharding_manager.reader import WeightReader
from rlhub.sharding_manager.route import Route
from rlhub.sharding_manager.separate import WeightReceiver, WeightSender
from rlhub.sharding_manager.transport import Transport
from tests.support import rollout_contract as contract

CPU = torch.device("cpu")
BUCKET = 1 << 14
LIMIT_S = 300.0
"""Of what is to come: the other side may still be loading its libraries."""
ENGINES: dict[str, Any] = {}


def trainer(path: str) -> FSDPEngine:
    if f"train {path}" not in ENGINES:
        ensure_process_group(CPU)
        engine = FSDPEngine(ModelConfig(path=path), FSDPConfig(), None, kind="policy", device=CPU)
        engine.initialize()
        ENGINES[f"train {path}"] = engine
    return ENGINES[f"train {path}"]


def rollout(path: str, dtype: str = "float32") -> RolloutEngine:
    if f"rollout {path} {dtype}" not in ENGINES:
        engine = build_rollout_engine(
            RolloutSetup(
                config=RolloutConfig(name="hf", dtype=dtype),  # type: ignore[arg-type]
                model=ModelConfig(path=path),
                device=CPU,
                seed=0,
                max_prompt_length=16,
                max_response_length=16,
            )
        )
        engine.initialize()
        ENGINES[f"rollout {path} {dtype}"] = engine
    return ENGINES[f"rollout {path} {dtype}"]


@torch.no_grad()
def step(engine: FSDPEngine) -> dict[str, Tensor]:
    """Changes every weight, as a training step would; returns the full weights after it."""
    for param in engine.params:
        param.local.mul_(1.01).add_(0.001)
    return {name: tensor.clone() for bucket in engine.named_weights() for name, tensor in bucket}


def wrong_names(engine: RolloutEngine, full: dict[str, Tensor]) -> list[str]:
    pieces = list(engine.live_weights())
    assert {piece.name for piece in pieces} == set(full)
    return [p.name for p in pieces if not torch.equal(p.tensor, take(full[p.name], p.region).to(p.tensor.dtype))]


def refuses(engine: RolloutEngine) -> bool:
    try:
        engine.generate(contract.requests()[:1], SamplingParams(max_new_tokens=1))
    except RlhubError:
        return True
    return False


def error_of(action: Callable[[], object]) -> tuple[str, str]:
    """Returns (type, message) of the error; ("", "") without."""
    try:
        action()
    except RlhubError as error:
        return type(error).__name__, str(error)
    return "", ""


# Colocated


def colocated(path: str, dtype: str, part_bytes: int) -> dict[str, Any]:
    """Does four updates with changed weights, then broken ones; transfers of `part_bytes` and more travel by themselves."""
    with mock.patch.object(schedule, "PART_BYTES", part_bytes):
        return updates(trainer(path), rollout(path, dtype))


def updates(train: FSDPEngine, engine: RolloutEngine) -> dict[str, Any]:
    """Returns what `colocated` reports."""
    manager = ShardingManager(train, engine, bucket_bytes=BUCKET)
    reports, wrong = [], []
    for version in range(4):
        full = step(train)
        reports.append(manager.sync(version))
        wrong += wrong_names(engine, full)
    bound = sum(p.tensor.nbytes for p in engine.live_weights()) - sum(
        piece.tensor.numel() * engine.weight_dtype(piece.name).itemsize for piece in train.local_weights() or ()
    )
    return {
        "wrong": wrong,
        "version": engine.version,
        "wire_bytes": [report.wire_bytes for report in reports],
        "bound": bound,
        "lost": lost_message(manager, engine),
        "flipped": flipped(manager, engine),
        "healed": manager.sync(9).version,
    }


def lost_message(manager: ShardingManager, engine: RolloutEngine) -> tuple[str, bool]:
    """Returns the name reported when what the last rank received first is lost, and whether the engine then refuses."""
    step(manager._train)  # type: ignore[arg-type]
    last, finish = dist.get_rank() == dist.get_world_size() - 1, Transport._finish
    before = {piece.name: piece.tensor.clone() for piece in engine.live_weights()}
    lost: list[str] = []

    def broken(self: Transport, pending: Any, posts: Any, buffer: Tensor, destination: LocalPieces) -> None:
        finish(self, pending, posts, buffer, destination)
        if last and not lost and posts:
            transfer = posts[0].part.transfers[0]
            lost.append(transfer.name)
            destination.write(transfer.name, transfer.region, take(before[transfer.name], transfer.region))

    with mock.patch.object(Transport, "_finish", broken):
        try:
            manager.sync(5)
        except WeightMismatchError as error:
            assert not lost or error.weight == lost[0]
            return error.weight, refuses(engine)
    return "", False


def flipped(manager: ShardingManager, engine: RolloutEngine) -> str:
    """Returns the name reported when one element changes on the last rank after everything has arrived."""
    last, exchange = dist.get_rank() == dist.get_world_size() - 1, Route._exchange

    def flip_first(self: Route, sent: dict[int, list[int]]) -> dict[int, list[int]]:
        if last:
            view = next(piece.tensor for piece in engine.live_weights() if piece.name == "model.norm.weight")
            view[-1] = torch.nextafter(view[-1], torch.tensor(torch.inf, dtype=view.dtype))
        return exchange(self, sent)

    with mock.patch.object(Route, "_exchange", flip_first):
        try:
            manager.sync(6)
        except WeightMismatchError as error:
            return error.weight
    return ""


# Separate pools


def connect(half: WeightSender | WeightReceiver, port: int, rank: int, world: int, timeout_s: float) -> None:
    half.connect("127.0.0.1", port, rank, world, timeout_s)


def send(path: str, port: int, receivers: int, versions: list[int], folder: str) -> list[tuple[str, str]]:
    """Sends updates to `receivers` processes; rank 0 leaves the full weights of each version in the folder."""
    train = trainer(path)
    rank, size = dist.get_rank(), dist.get_world_size()
    half = WeightSender(train, bucket_bytes=BUCKET)
    errors = []
    connect(half, port, rank, size + receivers, LIMIT_S)
    for version in versions:
        full = step(train)
        if rank == 0:
            torch.save(full, Path(folder) / f"{version}.pt")
        errors.append(error_of(lambda version=version: half.send(version)))  # type: ignore[misc]
    half.close()
    return errors


def receive(path: str, port: int, rank: int, world: int, versions: list[int], folder: str) -> dict[str, Any]:
    """Receives what `send` sends; returns what each update brought."""
    engine = rollout(path)
    half = WeightReceiver(engine, CPU, bucket_bytes=BUCKET)
    out: dict[str, Any] = {"errors": [], "wrong": [], "wire_bytes": []}
    connect(half, port, rank, world, LIMIT_S)
    for version in versions:
        error = ("", "")
        try:
            out["wire_bytes"].append(half.receive(version).wire_bytes)
            if folder:
                out["wrong"] += wrong_names(engine, torch.load(Path(folder) / f"{version}.pt"))
        except RlhubError as raised:
            error = type(raised).__name__, str(raised)
        out["errors"].append(error)
    half.close()
    return out | {"version": engine.version, "refuses": refuses(engine), "layout": len(half.layout())}


# By file


def write_versions(path: str, folder: str, versions: list[int]) -> list[int]:
    """Writes versions into the folder, and next to each the full weights; returns how many bytes this rank wrote of each."""
    train = trainer(path)
    writer = WeightWriter(train, Path(folder), bucket_bytes=BUCKET, timeout_s=LIMIT_S)
    sizes = []
    for version in versions:
        full = step(train)
        if dist.get_rank() == 0:
            torch.save(full, Path(folder) / f"{version}.pt")
        sizes.append(writer.write(version).bytes)
    return sizes


def read_versions(path: str, folder: str, versions: list[int], dtype: str) -> dict[str, Any]:
    """Returns what the reader's engine holds after each version, and what it says to versions that never come or are damaged."""
    engine = rollout(path, dtype)
    reader = WeightReader(engine, Path(folder), bucket_bytes=BUCKET, timeout_s=1)
    wrong = []
    for version in versions:
        reader.read(version)
        wrong += wrong_names(engine, torch.load(Path(folder) / f"{version}.pt"))
    serving = not refuses(engine)
    late = error_of(lambda: reader.read(99))
    return {"wrong": wrong, "version": engine.version, "serving": serving, "newest": reader.newest(), "late": late}


def mirror_versions(path: str, folder: str, versions: list[int]) -> list[tuple[bool, list[str]]]:
    """Serves each rank's part from a folder of its own; rank 0 mirrors both into an engine.  Returns for each version whether
    the fingerprints agree, and which weights are wrong."""
    train, rank, found = trainer(path), dist.get_rank(), []
    own = Path(folder) / f"rank-{rank}"
    own.mkdir()
    writer = WeightWriter(train, own, bucket_bytes=BUCKET, timeout_s=LIMIT_S, full_every=3, own_folder=True)
    server = VersionServer(own, host="127.0.0.1", rank=rank, timeout_s=LIMIT_S)
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, server.address)
    engine = rollout(path)
    replica = folder_reader(engine, ",".join(addresses), bucket_bytes=BUCKET, timeout_s=LIMIT_S) if rank == 0 else None
    for version in versions:
        full = step(train)
        written = writer.write(version)
        if replica is not None:
            report = replica.place(replica.prepare(version))
            found.append((report.fingerprint == written.fingerprint, wrong_names(engine, full)))
        dist.barrier()
    for ending in (server, writer, *([replica] if replica else [])):
        ending.close()
    return found


def read_damaged(path: str, folder: str, version: int) -> tuple[tuple[str, str], bool]:
    """Reads a good version, then one with a flipped bit; returns its error and whether the engine then refuses."""
    engine = rollout(path)
    reader = WeightReader(engine, Path(folder), bucket_bytes=BUCKET, timeout_s=1)
    reader.read(version)
    file = next((Path(folder) / f"version-{version}").glob("rank-1-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    return error_of(lambda: reader.read(version)), refuses(engine)


def send_and_die(path: str, port: int, world: int) -> None:
    """Sends two whole updates; in the third, the last sender is killed as soon as its first messages travel."""
    half = WeightSender(trainer(path), bucket_bytes=BUCKET)
    connect(half, port, dist.get_rank(), world, LIMIT_S)
    half.send(0)
    half.send(1)
    if dist.get_rank() == dist.get_world_size() - 1:
        exchange = Transport._exchange

        def last_act(self: Transport, *arguments: Any) -> None:
            exchange(self, *arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        Transport._exchange = last_act  # type: ignore[method-assign,assignment]
    half.send(2)
