"""Kills and stops processes of tiny training jobs at random moments, and says whether anything hung, was lost or came out else.

    python scripts/checks/kills.py --targets driver,rank,replica,reward,environment,stop --times 10 --jobs 2

A case is a job of six steps with all deadlines at 30 s, of which one process gets SIGKILL (stop: SIGSTOP for 60 s, then SIGCONT)
at a random moment.  Asserted: the job goes on to its end, or ends with an error of rlhub within 60 s (of its SIGCONT where the
driver was stopped); nothing of it stays alive; a job that ended is started again and comes to its end; every prompt was trained,
rejected or dropped exactly once; and the final weights of synchronous jobs are bit for bit those of a job that was left alone.
Exit status 1 where anything is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
from rich.console import Console
from rich.table import Table

from rlhub.protocol import DataProto
from scripts.checks import jobs
from scripts.checks.jobs import BATCH, SAMPLES, STEPS, Job, Task, final_weights

TARGETS = ("driver", "rank", "replica", "reward", "environment")
STOP = "stop"
ERROR_S, STOPPED_S = 60.0, 60.0
TOO_LATE = "over before the signal"
REDRAWN = 3
START_S, RUN_S = 240.0, 400.0
"""For a process to appear, and for a whole job: far above what they take on a busy machine."""
SCORE_S = 0.1
STEP_S = SCORE_S * BATCH * SAMPLES
"""What a step takes at least: the reward function sleeps, so that random moments fall into steps."""
console = Console(width=170, markup=False)  # what jobs write is no markup


@dataclass(slots=True, kw_only=True)
class Case:
    """kind: the target, or stop.  target: whose process.  after_step: its line is there; -1: as soon as the process is there.
    delay_s: from then."""

    kind: str
    target: str
    number: int
    after_step: int = 0
    delay_s: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.target}-{self.number}" if self.kind == STOP else f"{self.kind}-{self.number}"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """happened: in words; seconds: from the signal to the end or the next step; problems: none if all is as it should be."""

    case: Case
    happened: str = ""
    seconds: float = 0.0
    resumed: str = ""
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Matrix:
    """The jobs by target, and the weights that they have when they are left alone."""

    task: Task
    folder: Path
    deadline_s: float
    start_deadline_s: float
    weights: dict[str, dict[str, bytes]] = field(default_factory=dict)
    _turn: threading.Lock = field(default_factory=threading.Lock)

    def arguments(self, target: str, run: Path) -> list[str]:
        more = {
            "driver": (*jobs.RAY, "trainer.n_gpus_per_node=2"),
            "rank": (*jobs.RAY, "trainer.n_gpus_per_node=2"),
            "reward": (),
            "environment": jobs.environment(self.task),
            "replica": jobs.replicas(),
        }[target]
        start = tuple(f"trainer.deadline_s.{name}={self.start_deadline_s}" for name in ("start", "resources"))
        return self.task.arguments(run, *more, *start, deadline_s=self.deadline_s)

    def is_synchronous(self, target: str) -> bool:
        return target in ("driver", "rank", "reward")

    def undisturbed(self, target: str) -> dict[str, bytes]:
        """The weights at the end of a job that nobody touches; driver and rank have the same job."""
        key = "rank" if target == "driver" else target
        with self._turn:
            if key not in self.weights:
                folder = self.folder / f"undisturbed-{key}"
                job = jobs.start(self.arguments(key, folder / "run"), folder / "run", folder / "first.log")
                code = job.wait(RUN_S)
                if code != 0:
                    job.end()
                    raise SystemExit(f"the undisturbed job of {key} ended with {code}:\n{job.output[-3000:]}")
                self.weights[key] = final_weights(job.folder)
                console.print(f"undisturbed {key}: {time.monotonic() - job.started:.0f} s")
        return self.weights[key]


def victim(job: Job, target: str) -> psutil.Process | None:
    """The process to strike, once it is there."""
    match target:
        case "driver":
            return psutil.Process(job.process.pid)
        case "rank":
            return job.rank("actor_rollout_ref-rank1.log")
        case "replica":
            return job.rank("rollout-0.log")
        case "reward":
            return job.child("reward.py")
        case _:
            return job.child("rlhub.envs.child")


def run_case(matrix: Matrix, case: Case) -> Outcome:
    """One case; another moment is drawn where the job was over before it."""
    chance = random.Random(case.name)
    outcome = run_once(matrix, case)
    for _ in range(REDRAWN):
        if outcome.happened == TOO_LATE and not outcome.problems:
            outcome = run_once(matrix, draw(case, chance))
    return outcome


def run_once(matrix: Matrix, case: Case) -> Outcome:
    """Start, strike, watch, resume, audit."""
    outcome = Outcome(case=case)
    folder = matrix.folder / case.name
    expected = matrix.undisturbed(case.target) if matrix.is_synchronous(case.target) else None
    arguments = matrix.arguments(case.target, folder / "run")
    job = jobs.start(arguments, folder / "run", folder / "first.log")
    try:
        strike_and_watch(job, case, outcome)
        resume(job, arguments, case, outcome)
    finally:
        job.end()
    if not outcome.problems:
        outcome.problems += audit(folder / "run", case.target)
    if not outcome.problems and expected is not None and final_weights(folder / "run") != expected:
        outcome.problems.append("the final weights differ from the undisturbed run's")
    if outcome.problems:
        outcome.problems[0] += f" (logs in {folder})"
    else:
        shutil.rmtree(folder)
    return outcome


def strike_and_watch(job: Job, case: Case, outcome: Outcome) -> None:
    """One signal at the chosen moment, then until the job has ended."""
    found = job.until(lambda: victim(job, case.target), START_S)
    if case.after_step >= 0:
        job.until(lambda: case.after_step in job.steps() or case.after_step == 0, START_S)
    time.sleep(case.delay_s)
    found = victim(job, case.target) if found is None or not found.is_running() else found
    if job.code is not None or found is None:
        outcome.happened, code = TOO_LATE, job.wait(RUN_S)
        if code != 0:
            outcome.problems.append(f"ended with {code} before any signal: {job.output[-300:]!r}")
        return
    steps, struck = len(job.steps()), time.monotonic()
    with contextlib.suppress(psutil.NoSuchProcess):
        found.send_signal(signal.SIGSTOP if case.kind == STOP else signal.SIGKILL)
    if case.kind == STOP:
        job.wait(STOPPED_S)
        ended_s = time.monotonic() - struck
        with contextlib.suppress(psutil.NoSuchProcess):
            found.send_signal(signal.SIGCONT)
    else:
        job.until(lambda: len(job.steps()) > steps, RUN_S)
        ended_s = time.monotonic() - struck
    code = job.wait(RUN_S)
    outcome.seconds = ended_s if code == 0 or case.kind == STOP and ended_s < STOPPED_S else time.monotonic() - struck
    judge(job, code, case, outcome)


def judge(job: Job, code: int | None, case: Case, outcome: Outcome) -> None:
    """What became of the job: how it ended, whether in time, and what it left."""
    where = f"after step {max(job.steps(), default=0)}"
    if code is None:
        outcome.happened = "hung"
        outcome.problems.append(f"not over {RUN_S:.0f} s after the signal, {where}")
        return
    if code == 0:
        outcome.happened = "went on"
    elif case.target == "driver" and code == -signal.SIGKILL:
        outcome.happened = f"killed {where}"
    elif job.error and code in (1, 2):
        outcome.happened = f"{job.error} {where}"
        asleep_s = STOPPED_S if case.kind == STOP and case.target == "driver" else 0.0  # a stopped driver can end nothing
        if outcome.seconds > ERROR_S + asleep_s:
            outcome.problems.append(f"{job.error} only after {outcome.seconds:.0f} s")
    else:
        outcome.happened = f"exit {code}"
        outcome.problems.append(f"ended with {code} without an error of rlhub's: {job.output[-300:]!r}")
    since = time.monotonic()
    if left := job.ends_within(ERROR_S):
        outcome.problems.append(f"{len(left)} processes outlived it by {ERROR_S:.0f} s: {'; '.join(left)}")
    elif case.target == "driver" and code != 0:
        outcome.seconds = time.monotonic() - since  # until the last of its processes had gone


def resume(job: Job, arguments: Sequence[str], case: Case, outcome: Outcome) -> None:
    """The same command again, where the job has not come to its end."""
    if job.code == 0 or outcome.problems:
        return
    again = jobs.start(arguments, job.folder, job.log.with_name("again.log"))
    try:
        code = again.wait(RUN_S)
        outcome.resumed = f"rc {code}"
        if code != 0:
            outcome.problems.append(f"started again it ended with {code}: {again.output[-300:]!r}")
    finally:
        again.end()


def audit(run: Path, target: str) -> list[str]:
    """Every prompt was trained exactly once, or its end is in the log of prompts, or the last checkpoint has it in work; no step
    is missing."""
    problems = []
    batches = [DataProto.load_from_disk(run / "batches" / f"step-{step:06d}.safetensors") for step in range(1, STEPS + 1)]
    trained = [ordinal for batch in batches for ordinal in batch.batch["ordinal"][::SAMPLES].tolist()]
    if len(trained) != STEPS * BATCH or len(set(trained)) != len(trained):
        problems.append(f"trained {len(trained)} prompts, {len(set(trained))} of them different, expected {STEPS * BATCH}")
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    if [step for step in steps if step] != list(range(1, STEPS + 1)):
        problems.append(f"metrics.jsonl has the steps {steps}")
    ended = dict.fromkeys(trained, "trained")
    if target in ("replica", "environment"):
        rows = [json.loads(line) for line in (run / "prompts.jsonl").read_text().splitlines()]
        times = Counter(row["ordinal"] for row in rows)
        if twice := [ordinal for ordinal, count in times.items() if count > 1]:
            problems.append(f"prompts {twice} ended twice")
        ended = {row["ordinal"]: row["end"] for row in rows}
        if sorted(trained) != sorted(ordinal for ordinal, end in ended.items() if end == "trained"):
            problems.append("prompts.jsonl does not say trained of what was trained")
    begun, under_way = max(trained) + 1, set[int]()
    if target in ("replica", "environment"):
        ledger = json.loads((run / f"global_step_{STEPS}" / "rollouts.json").read_text())["executor"]["ledger"]
        begun, under_way = ledger["next_ordinal"], {ordinal for ordinal, _ in ledger["open"]}
    if lost := sorted(set(range(begun)) - set(ended) - under_way):
        problems.append(f"prompts {lost} were passed over")
    return problems


def cases(targets: Sequence[str], times: int, seed: int) -> list[Case]:
    """Moments drawn for each: a fifth while the job starts, the rest in any step."""
    drawn = []
    for kind in targets:
        for number in range(times):
            chance = random.Random(f"{seed}-{kind}-{number}")
            target = TARGETS[number % len(TARGETS)] if kind == STOP else kind
            drawn.append(draw(Case(kind=kind, target=target, number=number), chance))
    return drawn


def draw(case: Case, chance: random.Random) -> Case:
    """The case at another moment."""
    starting = chance.random() < 0.2
    after = -1 if starting else chance.randrange(STEPS)
    delay = chance.uniform(0, 10.0 if starting and case.target == "driver" else STEP_S)
    return replace(case, after_step=after, delay_s=delay)


def show(outcomes: Sequence[Outcome]) -> int:
    table = Table("case", "struck", "happened", "s", "started again", "problems")
    for outcome in outcomes:
        case = outcome.case
        moment = f"{'at the start' if case.after_step < 0 else f'after step {case.after_step}'} + {case.delay_s:.1f} s"
        problem = "; ".join(outcome.problems)
        table.add_row(case.name, moment, outcome.happened, f"{outcome.seconds:.1f}", outcome.resumed, problem)
    console.print(table)
    wrong = [outcome for outcome in outcomes if outcome.problems]
    console.print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} as they should be" + (": FAILED" if wrong else ""))
    return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join((*TARGETS, STOP)), help="of them all (default)")
    parser.add_argument("--times", type=int, default=10, help="cases of each target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side (default: %(default)s)")
    parser.add_argument("--deadline-s", type=float, default=30.0, help="every deadline of the jobs (default: %(default)s)")
    parser.add_argument(
        "--start-deadline-s", type=float, help="trainer.deadline_s.start and .resources, where a busy machine needs more"
    )
    parser.add_argument("--folder", type=Path, help="where the jobs write; those with problems stay there")
    given = parser.parse_args()
    targets = given.targets.split(",")
    if unknown := [name for name in targets if name not in (*TARGETS, STOP)]:
        parser.error(f"no target {', '.join(unknown)}; known: {', '.join((*TARGETS, STOP))}")
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    matrix = Matrix(
        task=Task(folder=folder / "task", seconds=SCORE_S).write(),
        folder=folder,
        deadline_s=given.deadline_s,
        start_deadline_s=given.start_deadline_s or given.deadline_s,
    )
    chosen = cases(targets, given.times, given.seed)
    outcomes = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for number, outcome in enumerate(pool.map(lambda case: run_case(matrix, case), chosen), 1):
            said = "; ".join(outcome.problems) or "as it should be"
            console.print(f"[{number}/{len(chosen)}] {outcome.case.name}: {outcome.happened}, {outcome.seconds:.1f} s: {said}")
            outcomes.append(outcome)
    return show(outcomes)


if __name__ == "__main__":
    sys.exit(main())
