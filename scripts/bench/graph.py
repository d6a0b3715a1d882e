"""A step as a graph against the same nodes one after the other: what runs at the same time, and what the executor itself costs.

    python scripts/bench/graph.py [--seconds 1.0] [--repeats 5] [--steps 200] [--ranks 1024] [--edges 8] [--show mermaid]

Nodes sleep, for their work would be done by other processes.  `overlap` is the time that a step saves against serial evaluation,
over the shorter of the two that may run at the same time.  The second line of each pair is the control: one edge that the columns
do not ask for makes them serial.  Overhead is the CPU time of a step of the graph of PPO whose nodes return columns that were
made before, less that of a loop that calls the same functions.

The coordinator deals the rows of --ranks ranks on --edges edges of a step, the policies in turn: one report and one question for
every 8 ranks, and a share for each rank.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from rlhub.pipeline.builtin import ppo
from rlhub.pipeline.columns import COLUMNS
from rlhub.pipeline.coordinator import DataCoordinator, Key, Policy, ReportedRows
from rlhub.pipeline.executor import Executor, Output
from rlhub.pipeline.graph import TaskGraph
from rlhub.pipeline.nodes import Node, NodeFields
from rlhub.pipeline.show import FORMS
from rlhub.protocol import Batch, DataProto
from tests.support.pipelines import FunctionCalls, SomeNeeds, graph_of, mix

NUM_ROWS, ROWS_PER_RANK, RANKS_PER_NODE = 1024, 16, 8
OVERLAP, THREE, OVERHEAD_MS, COORDINATOR_S = 0.8, 1.4, 2.0, 0.5
POLICIES: tuple[Policy, ...] = get_args(Policy)
REWARD_AND_PASSES: list[tuple[str, NodeFields]] = [
    ("sample", {"writes": "x"}),
    ("score", {"reads": "x", "writes": "s"}),
    ("passes", {"reads": "x", "writes": "p"}),
    ("update", {"reads": "s p"}),
]
INDEPENDENT: list[tuple[str, NodeFields]] = [("sample", {"writes": "x"})]
INDEPENDENT += [(f"pass{index}", {"reads": "x", "writes": f"p{index}"}) for index in range(3)]


def with_edge(nodes: list[tuple[str, NodeFields]], source: str, target: str) -> list[tuple[str, NodeFields]]:
    """The same nodes with one edge more."""
    return [(name, {**fields, "after": source} if name == target else fields) for name, fields in nodes]


def seconds_of(nodes: list[tuple[str, NodeFields]], nap_s: float, repeats: int) -> float:
    """The median time of a step whose nodes sleep so long, but for the first and the last."""

    def function(node: Node, batch: Batch) -> Output:
        time.sleep(0.0 if node.name in ("sample", "update") else nap_s)
        return mix(node, batch)

    executor = Executor(graph_of(nodes), FunctionCalls(function))
    times = []
    for step in range(repeats):
        start = time.perf_counter()
        executor(step + 1)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@dataclass(slots=True)
class Ready:
    """Nodes whose columns were made before: a step of the graph, and a loop that calls the same functions."""

    graph: TaskGraph
    outputs: dict[str, dict[str, torch.Tensor]]

    def function(self, node: Node, batch: Batch) -> Output:
        if node.rearranges:
            assert isinstance(batch, DataProto)
            for name, column in self.outputs[node.name].items():
                batch.batch[name] = column
            return batch
        return self.output(node)

    def output(self, node: Node) -> DataProto:
        columns = self.outputs[node.name]
        made = DataProto.from_dict(columns) if columns else DataProto()
        made.meta_info |= {use.name: 1 for use in node.writes if not COLUMNS[use.name].dims}
        return made


def ready() -> Ready:
    graph = ppo(None, SomeNeeds()).build()
    outputs = {
        node.name: {
            use.name: torch.arange(NUM_ROWS) if use.name == "row_order" else torch.zeros(NUM_ROWS)
            for use in node.writes
            if not use.family and COLUMNS[use.name].dims
        }
        for node in graph.nodes
    }
    return Ready(graph, outputs)


def overhead_ms(steps: int) -> tuple[float, int]:
    """The median CPU time of a step of the graph less that of a loop, and the number of nodes."""
    parts = ready()
    executor = Executor(parts.graph, FunctionCalls(parts.function), SimpleNamespace(trainer=SimpleNamespace(critic_warmup=0)))

    def loop() -> None:
        for node in parts.graph.nodes:
            parts.output(node)

    def cpu(call: Callable[[], object]) -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    times = [(cpu(lambda: executor(1)), cpu(loop)) for _ in range(steps)]
    graph, plain = (statistics.median(column) for column in zip(*times, strict=True))
    return 1e3 * (graph - plain), len(parts.graph.nodes)


def coordinator_s(num_ranks: int, num_edges: int, steps: int) -> float:
    """The median CPU time in which a coordinator takes the reports of a step and answers all ranks."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(64, 2048, (num_ranks, ROWS_PER_RANK))
    nodes = [range(first, min(first + RANKS_PER_NODE, num_ranks)) for first in range(0, num_ranks, RANKS_PER_NODE)]

    def reports(node: range) -> dict[int, ReportedRows]:
        groups = {rank: np.arange(ROWS_PER_RANK) // 8 + 2 * rank for rank in node}
        return {rank: ReportedRows(lengths=lengths[rank], groups=groups[rank], ref=rank, columns=("tokens",)) for rank in node}

    async def leader(coordinator: DataCoordinator, key: Key, node: range, policy: Policy) -> int:
        shares = [await coordinator.take(key, rank, num_ranks, policy=policy, columns=("tokens",)) for rank in node]
        return sum(map(len, shares))

    async def step(coordinator: DataCoordinator, number: int) -> float:
        parts = [reports(node) for node in nodes]
        start = time.process_time()
        waiting = []
        for edge in range(num_edges):
            key, policy = Key(number, f"edge{edge}"), POLICIES[edge % len(POLICIES)]
            coordinator.expect(key, range(num_ranks))
            waiting += [asyncio.create_task(leader(coordinator, key, node, policy)) for node in nodes]
            for part in parts:
                coordinator.put(key, part)
        dealt = sum(await asyncio.gather(*waiting))
        coordinator.drop(number)
        assert dealt == num_edges * num_ranks * ROWS_PER_RANK
        return time.process_time() - start

    async def run() -> float:
        coordinator = DataCoordinator()
        return statistics.median([await step(coordinator, number) for number in range(1, steps + 1)])

    return asyncio.run(run())


def checks_ms() -> float:
    """The CPU time of declaring and checking the pipeline of PPO, the sources of the workers read before."""
    start = time.process_time()
    ppo(None, SomeNeeds()).build()
    return 1e3 * (time.process_time() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long a node sleeps")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="steps over which the overhead is measured")
    parser.add_argument("--ranks", type=int, default=1024, help="ranks whose rows the coordinator deals")
    parser.add_argument("--edges", type=int, default=8)
    parser.add_argument("--show", choices=sorted(FORMS), help="print the graph of ppo instead")
    args = parser.parse_args()
    if args.show:
        sys.stdout.write(FORMS[args.show](ppo(None, SomeNeeds()).build()))
        return 0
    nap = args.seconds
    overhead, num_nodes = overhead_ms(args.steps)
    pair = seconds_of(REWARD_AND_PASSES, nap, args.repeats)
    pair_edge = seconds_of(with_edge(REWARD_AND_PASSES, "score", "passes"), nap, args.repeats)
    three = seconds_of(INDEPENDENT, nap, args.repeats)
    three_edge = seconds_of(with_edge(INDEPENDENT, "pass0", "pass1"), nap, args.repeats)
    dealt = coordinator_s(args.ranks, args.edges, args.repeats)
    coordinator = f"coordinator, {args.ranks} ranks x {args.edges} edges: s of CPU"
    rows = [
        (f"reward beside passes, {nap:g} s each: overlap", 2 - pair / nap, f"at least {OVERLAP}", 2 - pair / nap >= OVERLAP),
        ("    control: one false edge", 2 - pair_edge / nap, "at most 0", pair_edge >= 2 * nap),
        (f"three independent nodes of {nap:g} s: s", three, f"at most {THREE * nap:g}", three <= THREE * nap),
        ("    control: one false edge", three_edge, f"at least {2 * nap:g}", three_edge >= 2 * nap),
        (f"overhead of a step of {num_nodes} nodes: ms of CPU", overhead, f"at most {OVERHEAD_MS:g}", overhead <= OVERHEAD_MS),
        ("declaring and checking ppo: ms of CPU", checks_ms(), "", True),
        (coordinator, dealt, f"at most {COORDINATOR_S}", dealt <= COORDINATOR_S),
    ]
    for name, value, bound, holds in rows:
        sys.stdout.write(f"{name:52}{value:8.2f}   {bound}{'' if holds else '   <- not within'}\n")
    return 0 if all(holds for *_, holds in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
