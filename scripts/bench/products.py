"""Matrix products in float32 on one thread: torch's own beside oneDNN's as `rlhub.models.products` calls them, in one run.

    python scripts/bench/products.py [--hidden 128 384 896] [--rows 1 16 64 256 1024 4096] [--rounds 9]

The first table has the three products of a linear layer of hidden x hidden weights:
  forward             y  = x W^T     linear
  gradient of inputs  dx = dy W      linear
  gradient of weight  dW = dy^T x    weight_gradient
The second has products around the size from which oneDNN is chosen, MIN_MULTIPLICATIONS: of one row, of few rows, of as many
as the weight has, and with the narrow weights of low-rank adapters.

Both sides take turns; the figures are medians of microseconds a call, and those of the least disturbed turns.  oneDNN is
timed for every product, with all that `products` does around it; "chosen" says which library `products` takes on this
machine.  Operands are where the turn before has left them: small ones in the caches, which favours neither side.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from rlhub.models import products

TURN_S = 4e-4  # of a turn at least: shorter ones measure the clock
POWERS = range(17, 23)


@dataclass(slots=True, kw_only=True)
class Case:
    """A product by both libraries: calls, whether `products` chooses oneDNN, and seconds a call of every turn."""

    group: str
    name: str
    rows: int
    multiplications: int
    by_torch: Callable[[], Tensor]
    by_onednn: Callable[[], Tensor]
    chosen: bool
    torch_s: list[float] = field(default_factory=list)
    onednn_s: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return statistics.median(self.torch_s) / statistics.median(self.onednn_s)


def calls_onednn(call: Callable[[], Tensor]) -> bool:
    with patch.object(products, "_onednn", wraps=products._onednn) as spy:
        call()
    return bool(spy.called)


def layer_cases(group: str, rows: int, inputs: int, outputs: int) -> Iterator[Case]:
    """The three products of a layer of (outputs, inputs) weights."""
    x, weight, grad = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(rows, outputs)
    pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "forward": (lambda: functional.linear(x, weight), lambda: products.linear(x, weight)),
        "gradient of inputs": (lambda: torch.mm(grad, weight), lambda: products.linear(grad, weight.t())),
        "gradient of weight": (lambda: torch.mm(grad.t(), x), lambda: products.weight_gradient(grad, x)),
    }
    for name, (by_torch, by_onednn) in pairs.items():
        yield Case(
            group=group,
            name=name,
            rows=rows,
            multiplications=rows * inputs * outputs,
            by_torch=by_torch,
            by_onednn=by_onednn,
            chosen=calls_onednn(by_onednn),
        )


def threshold_cases() -> Iterator[Case]:
    """Products of about 2^17 to 2^22 multiplications; rows are what a shape leaves open."""
    for power in POWERS:
        size = 1 << power
        one_row, many_rows, cube = math.isqrt(size), math.isqrt(size // 16), round(size ** (1 / 3))
        shapes = {
            "square, for 1 row": (one_row, one_row),
            "square, for 16 rows": (many_rows, many_rows),
            "square, for as many rows": (cube, cube),
            "128 x 128": (128, 128),
            "8 x 384": (384, 8),
            "384 x 8": (8, 384),
        }
        for group, (inputs, outputs) in shapes.items():
            yield from layer_cases(group, max(1, round(size / (inputs * outputs))), inputs, outputs)


def timed(call: Callable[[], Tensor], number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number


def measure(cases: list[Case], rounds: int) -> None:
    """All turns of a case follow each other, so that both sides meet the same state of the machine."""
    with patch.multiple(products, MIN_MULTIPLICATIONS=0, MIN_ROWS=0, onednn_is_faster=lambda: True):
        for case in track(cases, "measuring", transient=True):
            fastest = min(timed(call, 2) for call in (case.by_torch, case.by_onednn, case.by_torch))  # and warms up
            number = max(1, round(TURN_S / fastest))
            for _ in range(rounds):
                case.torch_s.append(timed(case.by_torch, number))
                case.onednn_s.append(timed(case.by_onednn, number))


def show_layers(console: Console, cases: list[Case]) -> None:
    table = Table(title="linear layers, microseconds a call")
    for column in ("weight", "rows", "product", "torch", "oneDNN", "ratio", "least disturbed", "ratio", "chosen"):
        table.add_column(column, justify="left" if column in ("product", "chosen") else "right")
    for case in cases:
        own, one, least_own, least_one = (
            seconds * 1e6
            for seconds in (
                *(statistics.median(case.torch_s), statistics.median(case.onednn_s)),
                *(min(case.torch_s), min(case.onednn_s)),
            )
        )
        missed = case.chosen != (case.ratio > 1)
        table.add_row(
            *(case.group, f"{case.rows:,}", case.name, f"{own:,.1f}", f"{one:,.1f}", f"{own / one:.2f}"),
            *(f"{least_own:,.1f}, {least_one:,.1f}", f"{least_own / least_one:.2f}"),
            ("oneDNN" if case.chosen else "torch") + (", slower" if missed else ""),
            end_section=case.name == "gradient of weight",
        )
    console.print(table)


def show_threshold(console: Console, cases: list[Case]) -> None:
    """torch's time over oneDNN's, by shape and product, and the geometric mean over all of them."""
    table = Table(title="torch's time over oneDNN's, by multiplications")
    for column in ("weight", "product"):
        table.add_column(column)
    for power in POWERS:
        mark = ", from here oneDNN" if 1 << power == products.MIN_MULTIPLICATIONS else ""
        table.add_column(f"2^{power}{mark}", justify="right")
    rows: dict[tuple[str, str], list[float]] = {}  # by power, as the cases come
    for case in cases:
        rows.setdefault((case.group, case.name), []).append(case.ratio)
    for (group, name), ratios in rows.items():
        table.add_row(group, name, *(f"{ratio:.2f}" for ratio in ratios), end_section=name == "gradient of weight")
    means = [statistics.geometric_mean(ratios) for ratios in zip(*rows.values(), strict=True)]
    table.add_row("mean of all", "", *(f"{mean:.2f}" for mean in means))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 384, 896])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=max(Console().width, 130))
    faster = products.onednn_is_faster()
    console.print(f"{torch.backends.cpu.get_cpu_capability()}; oneDNN is {'' if faster else 'not '}taken for large products here")
    layers = [
        case
        for hidden in arguments.hidden
        for rows in arguments.rows
        for case in layer_cases(f"{hidden} x {hidden}", rows, hidden, hidden)
    ]
    around = list(threshold_cases())
    with torch.inference_mode():
        measure([*layers, *around], arguments.rounds)
    show_layers(console, layers)
    show_threshold(console, around)


if __name__ == "__main__":
    main()
