"""CPU cost of one GRPO step: rlhub in process and through Ray against a plain PyTorch loop and TRL's GRPOTrainer.

    python scripts/bench/grpo_step.py [--rounds 5] [--steps 3] [--response-tokens 16]

World size 1, hf engine, one thread, 1.2M parameters, 32 prompts x 8 samples, default checks on.  All four stay alive and
take turns, so a change in the machine's load hits them alike; the figure of each is the median of its rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import tiny_model
from rich.console import Console
from rich.table import Table

SUBJECTS = {"plain": "plain PyTorch loop", "trl": "TRL GRPOTrainer", "local": "rlhub, in process", "ray": "rlhub, through Ray"}
LIMITS = {"local": 1.10, "ray": 1.20}


class Subject:
    """One implementation in a process of its own."""

    def __init__(self, name: str, folder: Path, response_tokens: int) -> None:
        script = Path(__file__).with_name("grpo_step_subjects.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), name, str(folder), str(response_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=open(folder / f"{name}.log", "w"),  # noqa: SIM115 - lives as long as the process
            text=True,
        )

    def measure(self, steps: int) -> float:
        """CPU seconds per step."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended; its log is beside the model folder")
        return float(json.loads(line)["cpu_s"])

    def close(self) -> None:
        """End it in an orderly way."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps per round and subject")
    parser.add_argument("--response-tokens", type=int, default=16)
    parser.add_argument("--subjects", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    arguments = parser.parse_args()
    console = Console()
    folder = Path(tempfile.mkdtemp(prefix="rlhub-bench-"))
    parameters = tiny_model.build(folder)
    subjects = {name: Subject(name, folder, arguments.response_tokens) for name in arguments.subjects}
    try:
        for name, subject in subjects.items():
            console.print(f"warming up {SUBJECTS[name]}: {subject.measure(2):.3f} CPU-s per step")
        rounds: dict[str, list[float]] = {name: [] for name in subjects}
        for number in range(arguments.rounds):
            for name, subject in subjects.items():
                rounds[name].append(subject.measure(arguments.steps))
            console.print(f"round {number + 1} of {arguments.rounds} done")
    finally:
        for subject in subjects.values():
            subject.close()
    report(console, rounds, parameters, arguments.response_tokens)


def report(console: Console, rounds: dict[str, list[float]], parameters: int, response_tokens: int) -> None:
    """The table."""
    table = Table(title=f"GRPO step, {parameters / 1e6:.2f}M parameters, 32 prompts x 8, {response_tokens} response tokens")
    for column in ("", "CPU-s per step", "min .. max", "ratio to the plain loop", "limit"):
        table.add_column(column)
    medians = {name: statistics.median(values) for name, values in rounds.items()}
    base = medians.get("plain", float("nan"))
    for name, values in rounds.items():
        limit = f"{LIMITS[name]:.2f}" if name in LIMITS else ""
        row = (f"{medians[name]:.3f}", f"{min(values):.3f} .. {max(values):.3f}", f"{medians[name] / base:.2f}", limit)
        table.add_row(SUBJECTS[name], *row)
    console.print(table)


if __name__ == "__main__":
    main()
