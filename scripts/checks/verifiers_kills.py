"""Trains on an environment of the library verifiers, kills the driver and the environments' process, and audits what trained.

    python scripts/checks/verifiers_kills.py --python .venv-verifiers/bin/python [--steps 30] [--environment vowels] [--folder F]

The run is the recipe's (recipes/verifiers).  The environments' process is killed after a sixth of the steps, and the run must go
on; the driver is killed after a third and after two thirds, and the same command must go on from the newest checkpoint.  Then
every prompt must have trained exactly once, or have ended in prompts.jsonl, or be under way in the last checkpoint; every sampled
token must have trained; and the mean reward of the last fifth must exceed that of the first by --rise.  Exit status 1 if not.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.verifiers import run as recipe
from rlhub.protocol import DataProto
from scripts.checks import jobs

CHILD = "rlhub.agents.verifiers.child"
console = Console(width=150, markup=False)


@dataclass(slots=True, kw_only=True)
class Kill:
    """One signal.  target: child or driver.  step: it comes after this step.  went_on: the job did, by itself."""

    target: str
    step: int
    happened: str = "over before the signal"
    went_on: bool = False


@dataclass(slots=True, kw_only=True)
class Run:
    """The run and its command.  problems: none if all is as it should be."""

    folder: Path
    arguments: Sequence[str]
    wait_s: float
    problems: list[str] = field(default_factory=list)

    def attempt(self, number: int, kills: Sequence[Kill]) -> None:
        """Starts the command and sends the signals that are due before its next end."""
        job = jobs.start(self.arguments, self.folder / "run", self.folder / f"log{number}.txt")
        try:
            for kill in kills:
                self.strike(job, kill)
            code = job.wait(self.wait_s)
            expected = -signal.SIGKILL if kills and kills[-1].target == "driver" else 0
            if code != expected:
                self.problems.append(f"attempt {number} ended with {code}, expected {expected}: {job.output[-400:]!r}")
            if left := job.ends_within(60):
                self.problems.append(f"{len(left)} processes outlived attempt {number}: {'; '.join(left)}")
        finally:
            job.end()

    def strike(self, job: jobs.Job, kill: Kill) -> None:
        """Sends SIGKILL after the step; of the environments' process it waits for the step after."""
        if not job.until(lambda: kill.step in job.steps(), self.wait_s):
            self.problems.append(f"{kill.target}: step {kill.step} did not come")
            return
        victim = psutil.Process(job.process.pid) if kill.target == "driver" else job.until(lambda: job.child(CHILD), self.wait_s)
        if victim is None:
            self.problems.append(f"{kill.target}: no such process")
            return
        victim.kill()
        done = max(job.steps())
        kill.happened = f"killed after step {done}"
        if kill.target == "child":
            kill.went_on = bool(job.until(lambda: max(job.steps()) > done + 1, self.wait_s))


def audit(run: Path, steps: int) -> list[str]:
    """Returns what is wrong with the steps, the prompts and the tokens of a finished run."""
    batches = [DataProto.load_from_disk(run / "batches" / f"step-{step:06d}.safetensors") for step in range(1, steps + 1)]
    trained = [ordinal for batch in batches for ordinal in dict.fromkeys(batch.batch["ordinal"].tolist())]
    problems = [] if len(set(trained)) == len(trained) else ["prompts trained twice"]
    rows = [json.loads(line) for line in (run / "prompts.jsonl").read_text().splitlines()]
    ended: dict[int, str] = {row["ordinal"]: row["end"] for row in rows}
    if twice := [ordinal for ordinal, count in Counter(row["ordinal"] for row in rows).items() if count > 1]:
        problems.append(f"prompts {twice} ended twice")
    if sorted(trained) != sorted(ordinal for ordinal, end in ended.items() if end == "trained"):
        problems.append("prompts.jsonl does not say trained of what was trained")
    ledger = json.loads((run / f"global_step_{steps}" / "rollouts.json").read_text())["executor"]["ledger"]
    under_way = {ordinal for ordinal, _ in ledger["open"]}
    if lost := sorted(set(range(ledger["next_ordinal"])) - set(ended) - under_way):
        problems.append(f"prompts {lost} were passed over")
    metrics = metrics_of(run)
    if [row["step"] for row in metrics if row["step"]] != list(range(1, steps + 1)):
        problems.append(f"metrics.jsonl has the steps {[row['step'] for row in metrics]}")
    if untrained := sum(row.get("episode/openai/untrained_tokens", 0.0) for row in metrics):
        problems.append(f"{untrained:g} sampled tokens an episode did not train")
    return problems


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check(run: Run, steps: int, rise: float) -> int:
    """Runs, kills, resumes, audits and shows; returns the exit status."""
    began = time.monotonic()
    child, first, second = Kill(target="child", step=steps // 6), *(Kill(target="driver", step=steps * n // 3) for n in (1, 2))
    for number, kills in enumerate(([child, first], [second], [])):
        if not run.problems:
            run.attempt(number, kills)
    if not child.went_on and not run.problems:
        run.problems.append("the run did not go on after its environments' process was killed")
    table = Table("target", "happened", "went on")
    for kill in (child, first, second):
        table.add_row(kill.target, kill.happened, "by itself" if kill.went_on else "started again")
    console.print(table)
    if not run.problems:
        run.problems += audit(run.folder / "run", steps)
        rewards = recipe.rewards(run.folder / "run" / "metrics.jsonl")
        fifth = max(1, steps // 5)
        before, after = mean(rewards[:fifth]), mean(rewards[-fifth:])
        prompts = len((run.folder / "run" / "prompts.jsonl").read_text().splitlines())
        console.print(f"{steps} steps, {prompts} prompts ended once each, reward {before:.3f} to {after:.3f}")
        if after - before < rise:
            run.problems.append(f"the reward rose by {after - before:.3f}, expected {rise:g}")
    console.print(f"{time.monotonic() - began:.0f} s; " + ("; ".join(run.problems) or "as it should be"))
    return int(bool(run.problems))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=recipe.ROOT / ".venv-verifiers/bin/python")
    parser.add_argument("--environment", choices=sorted(recipe.ROLE), default="vowels")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rise", type=float, default=0.2, help="of the mean reward, from the first to the last fifth")
    parser.add_argument("--folder", type=Path, help="where the run writes (default: a temporary folder)")
    parser.add_argument("--wait-s", type=float, default=600.0, help="for a step and for an end (default: %(default)s)")
    given = parser.parse_args(arguments)
    folder = (given.folder or Path(tempfile.mkdtemp(prefix="verifiers-"))).absolute()
    recipe.prepare(given.environment, given.python, folder)
    settings = recipe.overrides(given.environment, given.python, folder, given.steps)
    settings += ["trainer.save_freq=2", "trainer.max_actor_ckpt_to_keep=2", "trainer.record_batches=True"]
    return check(Run(folder=folder, arguments=settings, wait_s=given.wait_s), given.steps, given.rise)


if __name__ == "__main__":
    sys.exit(main())
