"""The plan that moves a 1-trillion-parameter mixture of experts from 512 trainer ranks to 256 rollout ranks, without weights.

    python scripts/bench/reshard_plan.py [--gb-per-s 25] [--bucket-mb 1024] [--slices 1000] [--layouts cut whole]

Trainer: Megatron TP8 x PP16 x DP4, experts `cut` (each by TP8, dealt over EP4) or `whole` (dealt over EP32).  Rollout: eight
vLLM replicas of TP8 x DP4 with whole experts over EP32.  The planner is the one of real runs.

`bound` is what no plan can beat: the most that a rank must receive, or all bytes shared by all senders, over the bandwidth.
`wire` is the plan's busiest rank; `in rounds` the busiest rank of every round, added up.  Each random slice is checked element
by element against formulas of both layouts that share no code with the planner's.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rlhub.sharding_manager.plan import Plan, Transfer, make_plan
from rlhub.sharding_manager.schedule import Round, schedule
from tests.support.layouts import DecoderShape, Layout, megatron_layout, num_parameters, vllm_layout, weights

MODEL = DecoderShape(
    vocab_size=163_840,
    hidden_size=7168,
    intermediate_size=18_432,
    num_layers=61,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    num_experts=384,
    moe_intermediate_size=2048,
    num_dense_layers=1,
)
TP, PP, DP = 8, 16, 4
EXPERT_RANKS = {"cut": (4, 8), "whole": (32, 1)}
"""(expert parallel, tensor parallel of experts)"""
ROLLOUT_TP, ROLLOUT_EP, REPLICAS = 8, 32, 8
MIB = 1 << 20


class SlowLayouts:
    """Says whether a rank has one element: the layouts once more, as plain arithmetic."""

    def __init__(self, kind: str) -> None:
        self.ep, self.expert_tp = EXPERT_RANKS[kind]
        self.shapes = {weight.name: weight.shape for weight in weights(MODEL)}
        self.stages = [stage for stage in range(PP) for _ in range(61 // PP + (stage < 61 % PP))]

    def source_has(self, rank: int, name: str, index: tuple[int, ...]) -> bool:
        in_stage, stage = rank % (TP * DP), rank // (TP * DP)
        expert = re.search(r"experts\.(\d+)\.", name)
        layer = re.search(r"layers\.(\d+)\.", name)
        if stage != (self.stages[int(layer[1])] if layer else 0 if "embed" in name else PP - 1):
            return False
        if expert is None:
            return self._in_part(name, index, in_stage % TP, TP)
        block = int(expert[1]) * self.ep // MODEL.num_experts
        return block == in_stage // self.expert_tp % self.ep and self._in_part(
            name, index, in_stage % self.expert_tp, self.expert_tp
        )

    def destination_needs(self, rank: int, name: str, index: tuple[int, ...]) -> bool:
        expert = re.search(r"experts\.(\d+)\.", name)
        if expert is not None:
            return int(expert[1]) * ROLLOUT_EP // MODEL.num_experts == rank % ROLLOUT_EP
        return self._in_part(name, index, rank % ROLLOUT_TP, ROLLOUT_TP)

    def _in_part(self, name: str, index: tuple[int, ...], rank: int, ranks: int) -> bool:
        if "norm" in name or name.endswith("mlp.gate.weight"):
            return True
        dim = 1 if "o_proj" in name or "down_proj" in name else 0
        return index[dim] * ranks // self.shapes[name][dim] == rank  # sizes here are multiples, vocabulary included


@dataclass(kw_only=True)
class Checker:
    plan: Plan
    layouts: SlowLayouts
    random: Random

    @cached_property
    def received(self) -> list[dict[str, list[Transfer]]]:
        found: list[dict[str, list[Transfer]]] = []
        for transfers in self.plan.receives:
            found.append({})
            for transfer in transfers:
                found[-1].setdefault(transfer.name, []).append(transfer)
        return found

    def check(self, num_slices: int) -> int:
        """Returns how many elements were checked; AssertionError: one does not arrive exactly once, or not from an owner."""
        names, checked, found = list(self.layouts.shapes), 0, 0
        while found < num_slices:
            rank, name = self.random.randrange(len(self.plan.receives)), self.random.choice(names)
            shape = self.layouts.shapes[name]
            corner = tuple(self.random.randrange(size) for size in shape)
            needed = self.layouts.destination_needs(rank, name, corner)
            found += needed
            if needed or self.random.random() < 0.05:  # some of those, too, that must not be received
                checked += self._check_slice(rank, name, corner, shape)
        return checked

    def _check_slice(self, rank: int, name: str, corner: tuple[int, ...], shape: tuple[int, ...]) -> int:
        """Checks four elements a dimension, spread from the corner to the tensor's end."""
        indices: list[tuple[int, ...]] = [()]
        for start, size in zip(corner, shape, strict=True):
            indices = [(*index, start + (size - 1 - start) * i // 3) for index in indices for i in range(4)]
        for index in indices:
            senders = [transfer.source for transfer in self.received[rank].get(name, []) if covers(transfer, index)]
            expected = int(self.layouts.destination_needs(rank, name, index))
            assert len(senders) == expected, f"rank {rank} receives {name} {index} {len(senders)} times, not {expected}"
            assert all(self.layouts.source_has(source, name, index) for source in senders), (rank, name, index, senders)
        return len(indices)


def covers(transfer: Transfer, index: tuple[int, ...]) -> bool:
    return all(start <= i < stop for i, (start, stop) in zip(index, transfer.region, strict=True))


def make(kind: str) -> Plan:
    ep, expert_tp = EXPERT_RANKS[kind]
    sources: Layout = megatron_layout(MODEL, tp=TP, pp=PP, dp=DP, ep=ep, expert_tp=expert_tp)
    destinations = vllm_layout(MODEL, tp=ROLLOUT_TP, ep=ROLLOUT_EP, replicas=REPLICAS)
    first = len(sources)
    start = time.process_time()
    plan = make_plan(
        sources,
        destinations,
        source_processes=range(first),
        destination_processes=range(first, first + len(destinations)),
        nodes={process: process // 8 for process in range(first + len(destinations))},
    )
    print(f"experts {kind}: {first} trainer ranks -> {len(destinations)} rollout ranks", end=", ")
    print(f"{sum(map(len, plan.receives)):,} transfers, plan {time.process_time() - start:.1f} CPU s", flush=True)
    return plan


def busiest(one: Round) -> int:
    """Returns the bytes of the rank that sends or receives most."""
    sent, received = Counter[int](), Counter[int]()
    for message in one.messages:
        num_bytes = message.num_bytes
        sent[message.source] += num_bytes
        received[message.destination] += num_bytes
    return max(*sent.values(), *received.values())


def report(kind: str, arguments: argparse.Namespace) -> None:
    plan = make(kind)
    sent, received, rate = plan.sent_bytes, plan.received_bytes, arguments.gb_per_s * 1e9
    assert plan.wire_bytes == plan.lower_bound
    bound = max(max(received), sum(received) / len(sent)) / rate
    wire = max(*received, *sent) / rate
    print(f"  bytes {plan.wire_bytes / 1e12:.2f} TB, equal to the lower bound; most of a rank in GB: ", end="")
    print(f"received {max(received) / 1e9:.1f}, sent {max(sent) / 1e9:.1f} (mean {sum(sent) / len(sent) / 1e9:.1f})")
    print(f"  at {arguments.gb_per_s:g} GB/s a rank: wire {wire:.2f} s, bound {bound:.2f} s, {wire / bound:.2f} of it")
    start = time.process_time()
    checked = Checker(plan=plan, layouts=SlowLayouts(kind), random=Random(0)).check(arguments.slices)
    print(f"  {arguments.slices:,} random slices right ({checked:,} elements, {time.process_time() - start:.1f} s)", flush=True)
    if arguments.bucket_mb:
        start = time.process_time()
        rounds = schedule(plan, arguments.bucket_mb * MIB)
        seconds = time.process_time() - start
        in_rounds = sum(busiest(one) for one in rounds) / rate
        least = max(*received, *sent) / (arguments.bucket_mb * MIB)
        print(
            f"  rounds of {arguments.bucket_mb} MiB: {len(rounds)} (at least {least:.1f}), made in {seconds:.1f} CPU s; ", end=""
        )
        print(f"in rounds {in_rounds:.2f} s, {in_rounds / bound:.2f} of the bound", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb-per-s", type=float, default=25.0, help="each rank sends and, at the same time, receives")
    parser.add_argument("--bucket-mb", type=int, default=1024, help="0: no rounds")
    parser.add_argument("--slices", type=int, default=1000)
    parser.add_argument("--layouts", nargs="+", choices=list(EXPERT_RANKS), default=list(EXPERT_RANKS))
    arguments = parser.parse_args()
    print(f"{num_parameters(MODEL) / 1e12:.3f} trillion parameters, bf16")
    for kind in arguments.layouts:
        report(kind, arguments)


if __name__ == "__main__":
    main()
