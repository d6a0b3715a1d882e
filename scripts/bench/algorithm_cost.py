"""CPU cost of advantage estimators and of balancing against verl 0.9.1, and whether both compute the same numbers.

    python scripts/bench/algorithm_cost.py [--rounds 15] [--seeds 2] [--no-agreement] [--no-cost]

Makes verl's environment once, in .bench-venv (needs a package index then; later runs need none): verl without its
dependencies, over the packages of this environment.  For costs each side has a process of its own that does nothing else, since
what else a process has allocated decides how many pages each call must ask for anew.  One thread each, CPU time, both sides take
turns, medians; the calls wait for memory most of the time, so a ratio near 1 is worth no more than the rounds behind it.  verl's
calls number the prompts' names (about 0.4 ms), rlhub's batch carries the numbers.  Exit status 1 where the numbers differ and no
docstring of rlhub says why.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the child

import algorithm_inputs as drawn
import algorithm_rlhub as ours
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

PACKAGES = ("verl==0.9.1", "codetiming==1.4.0", "orjson==3.13.0")  # what `import verl.trainer.ppo.core_algos` takes
FOLDER = Path(__file__).resolve().parents[2] / ".bench-venv"
TOLERANCE = 1e-6
"""Of float64 numbers, relative to the largest: the small constants that keep divisions finite are in different places."""
COSTS = (  # rlhub's estimator, verl's function, limit of the ratio
    ("gae", "gae", 0.4),
    ("grpo", "grpo", 0.4),
    ("grpo", "grpo, vectorised", 1.5),
    ("rloo", "rloo", 0.4),
    ("rloo", "rloo, vectorised", 1.5),
)
BALANCE_LIMIT_MS = 50.0


def environment() -> Path:
    """The interpreter with verl, made where it is not there or of other versions."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / "complete"
    wanted = " ".join((*PACKAGES, sys.version.split()[0], sysconfig.get_path("purelib")))
    if stamp.exists() and stamp.read_text() == wanted and python.exists():
        return python
    shutil.rmtree(FOLDER, ignore_errors=True)
    venv.create(FOLDER, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *PACKAGES], check=True)
    own = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True, text=True
    )
    (Path(own.stdout.strip()) / "packages_of_rlhub.pth").write_text(sysconfig.get_path("purelib") + "\n")
    stamp.write_text(wanted)
    return python


class Side:
    """A child process that answers questions: algorithm_verl.py or algorithm_rlhub.py."""

    def __init__(self, python: Path | str, script: str, log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name(script))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(log, "w"),  # noqa: SIM115 - lives as long as the process
            text=True,
        )

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("{"):  # its libraries may print too
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"a side's process ended:\n{self.log.read_text()[-3000:]}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def difference(found: dict[str, Tensor], expected: dict[str, Tensor], mask: Tensor) -> float:
    """Largest difference of any number, relative to the largest of its tensor; per-token numbers count on model tokens."""
    if found.keys() != expected.keys():
        raise RuntimeError(f"the two sides of a case return {sorted(found)} and {sorted(expected)}")
    worst = 0.0
    for name, value in found.items():
        other, value = expected[name].double(), value.double()
        if value.shape == mask.shape:
            other, value = other * mask, value * mask
        worst = max(worst, float((value - other).abs().max() / other.abs().max().clamp(min=1e-12)))
    return worst


def explained(case: str) -> bool:
    """Whether the docstring that is to explain the difference still does."""
    return case in ours.DIFFERS and documented(*ours.DIFFERS[case])


def documented(module: str, words: str) -> bool:
    """Whether these words stand in the module, however its lines are broken."""
    source = " ".join(inspect.getsource(importlib.import_module(module)).split())
    return " ".join(words.split()) in source


def agreement(console: Console, verl: Side, folder: Path) -> bool:
    """Print every case; False where one differs unexplained, or agrees though it is listed as different."""
    file = folder / "verl.pt"
    verl.ask(do="agree", file=str(file))
    theirs, mine = torch.load(file, weights_only=True), ours.agreement()
    if theirs.keys() != mine.keys():
        raise RuntimeError(f"cases on one side only: {sorted(theirs.keys() ^ mine.keys())}")
    table = Table(title="The same random inputs, float64: values, and gradients of losses")
    for column in ("", "max relative difference", "", "why"):
        table.add_column(column)
    good = True
    masks = {True: drawn.batch().mask, False: drawn.batch(holes=False).mask}
    for case, numbers in mine.items():
        worst = difference(numbers, theirs[case], masks[case not in ("gdpo", "optimal_token_baseline")])
        if worst <= TOLERANCE:
            verdict, fine = "agree", case not in ours.DIFFERS
        else:
            verdict, fine = "differ", explained(case)
        why = f"{ours.DIFFERS[case][0]}: {ours.DIFFERS[case][1]}" if case in ours.DIFFERS else ""
        table.add_row(case, f"{worst:.1e}", verdict if fine else f"[red]{verdict}, which no docstring says", why)
        good = good and fine
    console.print(table)
    console.print("Not compared, since rlhub has none: verl's loss dro; since verl has none: cpgd, A-3PO, M2PO.")
    return good


def timed(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def costs(console: Console, verl: Side, rlhub: Side, rounds: int) -> None:
    """Estimators on a batch of the cost shape."""
    calls = list(dict.fromkeys(name for name, _, _ in COSTS))
    names = list(dict.fromkeys(theirs for _, theirs, _ in COSTS))
    spent: dict[str, list[float]] = {name: [] for name in (*calls, *(f"verl {name}" for name in names))}
    for number in range(rounds + 1):
        for name in calls:
            seconds = {name: rlhub.ask(do="cost", name=name)["cpu_s"]} | {
                f"verl {theirs}": verl.ask(do="cost", name=theirs)["cpu_s"] for theirs in names if theirs.split(",")[0] == name
            }
            for who, value in seconds.items():
                spent[who] += [value] if number else []  # the first warms up
    median = {who: statistics.median(values) * 1e3 for who, values in spent.items()}
    table = Table(title=f"Advantages of {drawn.COST_SHAPE[0]} x {drawn.COST_SHAPE[1]} tokens, 1 thread, CPU ms")
    for column in ("", "rlhub", "verl", "", "ratio", "limit"):
        table.add_column(column)
    for name, theirs, limit in COSTS:
        ratio = median[name] / median[f"verl {theirs}"]
        mark = "" if ratio <= limit else " [red]missed"
        table.add_row(name, f"{median[name]:.1f}", f"{median[f'verl {theirs}']:.1f}", theirs, f"{ratio:.3f}{mark}", f"{limit}")
    console.print(table)


def balancing(console: Console, verl: Side, rounds: int, seeds: int) -> None:
    """10,000 lengths into 512 parts, sizes free; and equal sizes, of the nearest number that verl takes."""
    table = Table(title=f"Balancing into {drawn.NUM_PARTS} parts: CPU ms, and largest part over the mean")
    for column in ("lengths", "seed", "items", "sizes", "rlhub ms", "verl ms", "rlhub max/mean", "verl max/mean", ""):
        table.add_column(column)
    for equal, items in ((False, drawn.NUM_ITEMS), (True, drawn.EQUAL_ITEMS)):
        for kind in drawn.LENGTH_KINDS:
            for seed in range(seeds):
                lengths = drawn.lengths(kind, items, seed)
                mean = lengths.sum() / drawn.NUM_PARTS
                call = lambda: ours.balance(kind, items, seed, equal)  # noqa: E731, B023 - called at once
                mine = statistics.median(timed(call) for _ in range(rounds)) * 1e3
                largest = max(lengths[part].sum() for part in call()) / mean
                theirs = verl.ask(do="balance", kind=kind, items=items, seed=seed, equal=equal)
                worse = largest > theirs["largest"] / mean
                verdict = "[red]missed" if worse or mine > BALANCE_LIMIT_MS else ""
                sizes = "equal" if equal else "free"
                both = (f"{largest:.5f}", f"{theirs['largest'] / mean:.5f}")
                table.add_row(kind, str(seed), str(items), sizes, f"{mine:.1f}", f"{theirs['cpu_s'] * 1e3:.0f}", *both, verdict)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=2, help="of each distribution of lengths; verl takes about 10 s for one")
    parser.add_argument("--agreement", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--cost", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=170)
    good = True
    with tempfile.TemporaryDirectory(prefix="rlhub-bench-") as folder:
        verl = Side(environment(), "algorithm_verl.py", Path(folder) / "verl.log")
        rlhub = Side(sys.executable, "algorithm_rlhub.py", Path(folder) / "rlhub.log")
        try:
            if arguments.cost:  # first, so that both processes are fresh
                costs(console, verl, rlhub, arguments.rounds)
                balancing(console, verl, arguments.rounds, arguments.seeds)
            if arguments.agreement:
                good = agreement(console, verl, Path(folder))
        finally:
            verl.close()
            rlhub.close()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
