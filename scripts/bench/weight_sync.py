"""Weights from a training layout to a rollout layout, against other ways of bringing them there, in one run.

    python scripts/bench/weight_sync.py [--millions 54] [--bucket-mb 64] [--repeats 5] [--only fsdp2] [--profile]

Four processes on this machine hold plain tensors in the named layouts; `planned` is what the sharding manager runs at every
sync, its checks included.  The same processes take turns with

  copy       every rank copies as many bytes as its engine needs from its own memory: what no synchronisation can do without
  broadcast  the full model is gathered on rank 0 and broadcast, every rank keeps its part
  file       the full model is gathered on rank 0, saved as safetensors, flushed to disk, and loaded by every rank

wall is the slowest rank's time, the best of the repeats; CPU the sum over ranks in the same repeat; `extra` the highest resident
memory above what was there, on the worst rank, planning and first use included.  --profile shows where `planned` spends its
time, and this machine's limits for the same bytes: see weight_sync_profile.py.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
import weight_sync_profile
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rlhub.protocol.weights.pieces import Piece, PieceInfo, sizes, take
from rlhub.sharding_manager.layout_exchange import Member, Side, exchange_members, this_node
from rlhub.sharding_manager.peers import Peers
from rlhub.sharding_manager.route import BUFFER_BUCKETS, Route, make_route
from rlhub.utils.atomic import fsync_file
from tests.support.layouts import (
    DecoderShape,
    Layout,
    fsdp_layout,
    full_layout,
    megatron_layout,
    num_parameters,
    shapes,
    vllm_layout,
)

MIB = 1 << 20
WORLD = 4
TIMEOUT_S = 300.0
FP32 = torch.float32
CPU = torch.device("cpu")


@dataclass(slots=True, kw_only=True)
class Pair:
    """Two layouts.  separate: in processes of their own, senders first; else both in each process."""

    name: str
    sources: Layout
    destinations: Layout
    separate: bool = False

    @property
    def world(self) -> int:
        return len(self.sources) + len(self.destinations) if self.separate else len(self.sources)


def decoder(millions: int) -> DecoderShape:
    """Returns a model of about that many million parameters."""
    hidden = 768 if millions < 200 else 1536
    vocabulary = 16_000
    layer = 4 * hidden**2 + 3 * hidden * 4 * hidden
    return DecoderShape(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=max(2, round((millions * 1e6 - vocabulary * hidden) / layer)),
        num_heads=hidden // 64,
        num_kv_heads=hidden // 64,
        head_dim=64,
        tied=True,
    )


def pairs(model: DecoderShape) -> list[Pair]:
    tensors = shapes(model)
    full = full_layout(tensors, 1, dtype=FP32)
    fsdp2 = fsdp_layout(tensors, 2, dtype=FP32)
    tp2 = megatron_layout(model, tp=2, dtype=FP32)
    pp2 = megatron_layout(model, tp=1, pp=2, dtype=FP32)
    engine2 = vllm_layout(model, tp=2, dtype=FP32)
    return [
        Pair(name="fsdp1 -> full", sources=full, destinations=full),
        Pair(name="fsdp2 -> full x2", sources=fsdp2, destinations=full * 2),
        Pair(name="fsdp2 -> tp2", sources=fsdp2, destinations=engine2),
        Pair(name="megatron tp2 -> tp2", sources=tp2, destinations=engine2),
        Pair(name="megatron tp2 -> full x2", sources=tp2, destinations=full * 2),
        Pair(name="megatron pp2 -> full x2", sources=pp2, destinations=full * 2),
        Pair(name="fsdp2 | full", sources=fsdp2, destinations=full, separate=True),
        Pair(name="fsdp2 | tp2", sources=fsdp2, destinations=engine2, separate=True),
        Pair(name="megatron tp2 | full x2", sources=tp2, destinations=full * 2, separate=True),
    ]


# One process


@dataclass(slots=True, kw_only=True)
class Rank:
    """One process of a pair and the tensors it holds."""

    pair: Pair
    peers: Peers | None
    group: dist.ProcessGroup
    rank: int
    bucket_bytes: int
    folder: Path
    source_pieces: list[Piece] = field(init=False)
    destination_pieces: list[Piece] = field(init=False)
    route: Route = field(init=False)

    def __post_init__(self) -> None:
        self.source_pieces = hold(self._layout(self.pair.sources, self.source_ranks), fill=True)
        self.destination_pieces = hold(self._layout(self.pair.destinations, self.destination_ranks), fill=False)

    @property
    def source_ranks(self) -> range:
        return range(len(self.pair.sources))

    @property
    def destination_ranks(self) -> range:
        first = len(self.pair.sources) if self.pair.separate else 0
        return range(first, first + len(self.pair.destinations))

    def _layout(self, layout: Layout, ranks: range) -> list[PieceInfo]:
        return layout[ranks.index(self.rank)] if self.rank in ranks else []

    # The subjects

    def planned(self) -> Callable[[], object]:
        """Returns what ShardingManager, WeightSender and WeightReceiver do after the first sync."""
        side: Side = "both" if not self.pair.separate else "sender" if self.rank in self.source_ranks else "receiver"
        route = self.route = self._route(side, [piece.info for piece in self.destination_pieces], check=True)
        return lambda: route.run(self.source_pieces, self.destination_pieces, 0)

    def _route(self, side: Side, destinations: list[PieceInfo], *, check: bool) -> Route:
        sources = [piece.info for piece in self.source_pieces] if side != "receiver" else []
        member = Member(side=side, node=this_node(), device="cpu", sources=sources, destinations=destinations)
        members = exchange_members(self.peers, member)
        return make_route(self.peers, members, memory_bytes=BUFFER_BUCKETS * self.bucket_bytes, check=check)

    def copy(self) -> Callable[[], None]:
        spare = [torch.ones_like(piece.tensor, memory_format=torch.contiguous_format) for piece in self.destination_pieces]

        def copy() -> None:
            for piece, values in zip(self.destination_pieces, spare, strict=True):
                piece.tensor.copy_(values)

        return copy

    def broadcast(self) -> Callable[[], None]:
        gather = self._gather()

        def run() -> None:
            full = gather()
            for name, shape in self._shapes().items():
                values = full[name] if self.rank == 0 else torch.empty(shape)
                if self.peers is not None:
                    dist.broadcast(values, group=self.group, group_src=0)
                self._keep(name, values)

        return run

    def file(self) -> Callable[[], None]:
        gather, path = self._gather(), self.folder / "model.safetensors"

        def run() -> None:
            full = gather()
            if self.rank == 0:
                save_file(full, path)
                fsync_file(path)
            dist.barrier(group=self.group)
            if self.destination_pieces:
                with safe_open(path, framework="pt") as opened:
                    for name in self._shapes():
                        self._keep(name, opened.get_tensor(name))
            dist.barrier(group=self.group)

        return run

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {info.name: info.shape for layout in (*self.pair.destinations,) for info in layout}

    def _keep(self, name: str, values: Tensor) -> None:
        for piece in self.destination_pieces:
            if piece.name == name:
                piece.tensor.copy_(take(values, piece.region))

    def _gather(self) -> Callable[[], dict[str, Tensor]]:
        """Returns what gathers the full model on rank 0, by a plan of its own without checks."""
        needed = full_layout(self._shapes(), 1, dtype=FP32)[0] if self.rank == 0 else []
        route = self._route("both" if needed else "sender", needed, check=False)

        def gather() -> dict[str, Tensor]:
            pieces = hold(needed, fill=False)
            route.run(self.source_pieces, pieces, 0)
            return {piece.name: piece.tensor for piece in pieces}

        return gather


def hold(infos: Sequence[PieceInfo], *, fill: bool) -> list[Piece]:
    """Returns tensors in the layout: zero, or whole numbers that follow from the place in the full tensor."""
    pieces = []
    for info in infos:
        tensor = torch.zeros(sizes(info.region), dtype=info.dtype)
        for dim, (start, stop) in enumerate(info.region if fill else ()):
            shape = [-1 if axis == dim else 1 for axis in range(tensor.dim())]
            tensor += (torch.arange(start, stop) * (7 + 6 * dim) % 1021 + 1).to(info.dtype).view(shape)
        pieces.append(Piece(name=info.name, tensor=tensor, shape=info.shape, region=info.region))
    return pieces


def resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(key)


def extra_memory(action: Callable[[], object]) -> int:
    """Returns the highest resident bytes during the action above those before it."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident("VmRSS")
    action()
    return max(0, resident("VmHWM") - before)


@dataclass(slots=True, kw_only=True)
class Result:
    wall_s: float = float("inf")
    cpu_s: float = float("inf")
    extra_bytes: int = 0


def measure(rank: Rank, repeats: int) -> dict[str, Result]:
    """Runs all subjects in turn, so that a busy machine troubles them alike."""
    results: dict[str, Result] = {}
    actions: dict[str, Callable[[], object]] = {}

    def first(name: str) -> None:
        actions[name] = getattr(rank, name)()
        actions[name]()

    for name in ("planned", "copy", "broadcast", "file"):
        dist.barrier(group=rank.group)
        used = extra_memory(partial(first, name))
        results[name] = Result(extra_bytes=int(gathered(rank.group, used).max()))
        if name != "copy":
            check(rank)
    for _ in range(repeats):
        for name, action in actions.items():
            dist.barrier(group=rank.group)
            wall, cpu = time.perf_counter(), time.process_time()
            action()
            wall_s, cpu_s = gathered(rank.group, time.perf_counter() - wall, time.process_time() - cpu).T
            if wall_s.max() < results[name].wall_s:
                results[name].wall_s, results[name].cpu_s = float(wall_s.max()), float(cpu_s.sum())
    return results


def check(rank: Rank) -> None:
    """Asserts that the engine has the right values; then clears them for the next subject."""
    expected = hold([piece.info for piece in rank.destination_pieces], fill=True)
    for piece, right in zip(rank.destination_pieces, expected, strict=True):
        assert torch.equal(piece.tensor, right.tensor), piece.name
        piece.tensor.zero_()


def gathered(group: dist.ProcessGroup, *values: float) -> Tensor:
    """Returns every rank's values, of shape (ranks, values)."""
    out = [torch.empty(len(values), dtype=torch.float64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(out, torch.tensor(values, dtype=torch.float64), group=group)
    return torch.stack(out)


def serve(rank: int, port: int, arguments: argparse.Namespace, folder: Path) -> None:
    """Runs one process's part of every pair."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    for pair in pairs(decoder(arguments.millions)):
        if arguments.only not in pair.name:
            continue
        group = dist.new_group(list(range(pair.world)))
        if rank < pair.world:
            peers = None
            if pair.world > 1:
                labels = ["rank"] * pair.world
                peers = Peers(group, rank=rank, size=pair.world, device=CPU, timeout_s=TIMEOUT_S, labels=labels)
            this = Rank(pair=pair, peers=peers, group=group, rank=rank, bucket_bytes=arguments.bucket_mb * MIB, folder=folder)
            results = measure(this, arguments.repeats)
            size = int(gathered(group, sum(piece.tensor.nbytes for piece in this.destination_pieces)).sum())
            if rank == 0:
                report(pair, results, size)
            if arguments.profile:
                ranks = weight_sync_profile.profile(this.planned(), this.route, group, arguments.repeats)
                if rank == 0:
                    weight_sync_profile.show(ranks, results["copy"].wall_s, results["copy"].cpu_s)
        dist.barrier()
    dist.destroy_process_group()


def report(pair: Pair, results: dict[str, Result], size: int) -> None:
    """Prints one pair's table.  size: the bytes that all ranks' engines need."""
    planned = results["planned"]
    for name, result in results.items():
        print(
            f"{pair.name if name == 'planned' else '':30}{name:11}{result.wall_s:8.3f}{size / result.wall_s / 1e9:8.2f}"
            f"{result.wall_s / planned.wall_s:9.2f}x{result.cpu_s:9.3f}{result.cpu_s / planned.cpu_s:9.2f}x"
            f"{result.extra_bytes / MIB:11.0f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("millions", 54), ("bucket-mb", 64), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", default=None, help="where the file baseline writes; default: the system's temporary folder")
    parser.add_argument("--only", default="", help="pairs whose name has this in it")
    parser.add_argument("--profile", action="store_true", help="where a sync's time goes, beside the machine's limits")
    arguments = parser.parse_args()
    model = decoder(arguments.millions)
    size = f"{num_parameters(model) / 1e6:.0f} M parameters in {len(shapes(model))} weights, float32"
    print(f"{size}; buckets of {arguments.bucket_mb} MiB; -> in the same processes, | in others")
    print(f"{'':41}{'wall s':>8}{'GB/s':>8}{'of ours':>10}{'CPU s':>9}{'of ours':>10}{'extra MiB':>11}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        ranks = [context.Process(target=serve, args=(rank, port, arguments, Path(folder))) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()


if __name__ == "__main__":
    main()
