"""Runs a tiny training job for every kind of fault that `trainer.faults` can plan, and says what each came to.

    python scripts/checks/faults.py [--only storage,reward] [--match kill] [--jobs 2]

Each job has a fault at a place and step.  Asserted: it struck; the job ends with the expected error of rlhub's within 60 s of it,
or goes on to its end as expected; nothing of the job stays alive; one that ended comes to its end when it is started again, the
fault still in its settings; then synchronous jobs have bit for bit the weights of a job without a fault, unless the fault changed
what is trained.  Exit status 1 where anything of it is not so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.table import Table

from rlhub.utils.faults import PLACES
from scripts.checks import jobs
from scripts.checks.jobs import Job, Task, final_weights

DEADLINE_S, START_S, WITHIN_S, RUN_S = 20.0, 120.0, 60.0, 400.0
"""Of each wait in a job but that for its start; for that, on a busy machine; from a fault to the job's error; for a whole job."""
KILLED, WENT_ON = "killed", "went on"
console = Console(width=170, markup=False)  # what jobs write is no markup
Check = Callable[[Job], str]
"""Of a job that has ended: what is not as it should be, or ""."""


@dataclass(slots=True, kw_only=True)
class Case:
    """group: for --only.  faults: the rows.  expected: how it may end: an error's class, KILLED or WENT_ON.  job: which one, see
    Runner.arguments.  same: whether the weights are those without a fault.  check: what else holds."""

    group: str
    faults: tuple[str, ...]
    expected: tuple[str, ...]
    job: str = "sync"
    settings: tuple[str, ...] = ()
    same: bool = True
    check: Check | None = None

    @property
    def name(self) -> str:
        return " + ".join(fault.replace("kind: ", "").replace("place: ", "").replace(",", "") for fault in self.faults)

    @property
    def rows(self) -> str:
        return f"trainer.faults=[{','.join('{' + fault + '}' for fault in self.faults)}]"


def fault(kind: str, place: str, **more: float) -> str:
    """A row of trainer.faults."""
    assert kind in PLACES[place].kinds, f"{kind} cannot happen at {place}"
    return ", ".join([f"kind: {kind}", f"place: {place}", *(f"{name}: {value}" for name, value in ({"step": 3} | more).items())])


def metric(name: str, least: float) -> Check:
    """The metric of some step is at least so large."""

    def check(job: Job) -> str:
        rows = [json.loads(line) for line in (job.folder / "metrics.jsonl").read_text().splitlines()]
        largest = max((abs(float(row[name])) for row in rows if row.get(name) is not None), default=0.0)
        return "" if largest >= least else f"{name} is {largest:g} at most, expected {least:g} somewhere"

    return check


def says(text: str) -> Check:
    """The output has the text."""
    return lambda job: "" if text in job.output else f"{text!r} is not in its output"


LENIENT = ("reward_model.max_error_rate=0.5",)
FAILED = metric("reward/num_failed", 1.0)
MISMATCH = metric("mismatch/kl", 0.01)
WORKER = ("WorkerError",)
SURVIVES = (WENT_ON, "WorkerDiedError", "DeadlineError", "WorkerError")

CASES: list[Case] = [
    Case(group="process", faults=(fault("kill", "driver.step"),), expected=(KILLED,)),
    Case(group="process", faults=(fault("kill", "driver.commit"),), expected=(KILLED,)),
    Case(group="process", faults=(fault("kill", "driver.log"),), expected=(KILLED,)),
    Case(group="process", faults=(fault("stop", "driver.step", seconds=5),), expected=(WENT_ON,)),
    Case(group="process", faults=(fault("raise", "driver.step"),), expected=("InjectedFaultError",)),
    Case(group="process", faults=(fault("delay", "driver.commit", seconds=2),), expected=(WENT_ON,)),
    Case(group="process", job="ranks", faults=(fault("kill", "actor.update_actor", rank=1),), expected=("WorkerDiedError",)),
    Case(
        group="process",
        job="ranks",
        faults=(fault("stop", "rollout.generate_sequences", rank=1),),
        expected=("DeadlineError", "WorkerError"),
    ),
    Case(group="process", job="ranks", faults=(fault("raise", "actor.sync_weights", rank=1),), expected=WORKER),
    Case(
        group="communication",
        job="ranks",
        faults=(fault("delay", "actor.update_actor", rank=1),),
        expected=("DeadlineError", "WorkerError"),
    ),
    Case(group="communication", job="replicas", faults=(fault("lost", "replica.reply"),), expected=SURVIVES, same=False),
    Case(group="communication", job="replicas", faults=(fault("duplicate", "replica.reply"),), expected=(WENT_ON,), same=False),
    Case(group="communication", job="remote", faults=(fault("refused", "remote.request"),), expected=WORKER),
    Case(group="communication", job="remote", faults=(fault("reset", "remote.request"),), expected=WORKER),
    Case(group="replica", job="replicas", faults=(fault("kill", "replica.generate"),), expected=(WENT_ON,), same=False),
    Case(group="replica", job="replicas", faults=(fault("stop", "replica.generate"),), expected=SURVIVES, same=False),
    Case(group="replica", job="replicas", faults=(fault("kill", "replica.update_weights"),), expected=(WENT_ON,), same=False),
    Case(
        group="replica", job="replicas", faults=(fault("kill", "replica.start", rank=1, step=0),), expected=SURVIVES, same=False
    ),
    Case(group="replica", job="async", faults=(fault("raise", "replica.generate"),), expected=SURVIVES, same=False),
    Case(group="storage", faults=(fault("full", "checkpoint.write"),), expected=("WorkerError", "CheckpointError")),
    Case(group="storage", faults=(fault("readonly", "checkpoint.write"),), expected=("WorkerError", "CheckpointError")),
    Case(group="storage", faults=(fault("kill", "checkpoint.write"),), expected=(KILLED,)),
    Case(group="storage", faults=(fault("truncate", "checkpoint.written"),), expected=("CheckpointError",)),
    Case(group="storage", faults=(fault("full", "metrics.write"),), expected=("RunFolderError",)),
    *(
        Case(
            group="storage",
            faults=(fault(kind, place), fault("kill", "driver.step", step=4)),
            expected=(KILLED,),
            check=says("checkpoint skipped"),
        )
        for kind, place in (
            ("flip", "checkpoint.written"),
            ("truncate", "checkpoint.committed"),
            ("flip", "checkpoint.committed"),
        )
    ),
    Case(group="engine", faults=(fault("raise", "rollout.generate_sequences"),), expected=WORKER),
    Case(group="engine", job="async", faults=(fault("raise", "engine.step"),), expected=SURVIVES, same=False),
    Case(group="engine", faults=(fault("nonfinite", "engine.weights"),), expected=WORKER),
    Case(group="engine", faults=(fault("wrong", "engine.weights"),), expected=("PolicyMismatchError",)),
    Case(group="engine", faults=(fault("nonfinite", "engine.log_probs"),), expected=WORKER),
    Case(
        group="engine",
        faults=(fault("wrong", "engine.log_probs"),),
        expected=(WENT_ON, "EngineError"),
        same=False,
        check=MISMATCH,
    ),
    *(
        Case(
            group="reward", faults=(fault(kind, "reward.call"),), expected=(WENT_ON,), settings=LENIENT, same=False, check=FAILED
        )
        for kind in ("raise", "kill", "segfault", "nonfinite")
    ),
    Case(
        group="reward",
        faults=(fault("delay", "reward.call"),),
        expected=(WENT_ON,),
        settings=(*LENIENT, "reward_model.timeout_s=2"),
        same=False,
        check=FAILED,
    ),
    Case(
        group="reward",
        faults=(fault("raise", "reward.call"),),
        expected=("RewardError",),
        settings=("reward_model.on_error=fail",),
    ),
    *(
        Case(group="environment", job="environment", faults=(fault(kind, "environment.call"),), expected=(WENT_ON,), same=False)
        for kind in ("kill", "stop", "raise")
    ),
]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """happened: in words; seconds: from the fault to the job's end; problems: none if all is as expected."""

    case: Case
    happened: str = ""
    seconds: float = 0.0
    resumed: str = ""
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Runner:
    """server: settings of a rollout server that runs beside the checks, where a case needs one; it has the weights of one job
    at a time."""

    task: Task
    folder: Path
    server: tuple[str, ...] = ()
    weights: dict[str, dict[str, bytes]] = field(default_factory=dict)
    turn: threading.Lock = field(default_factory=threading.Lock)
    server_turn: threading.Lock = field(default_factory=threading.Lock)

    def arguments(self, name: str, run: Path, *more: str) -> list[str]:
        """The command's settings."""
        job = {
            "sync": (),
            "ranks": (*jobs.RAY, "trainer.n_gpus_per_node=2"),
            "async": jobs.ASYNC,
            "replicas": jobs.replicas(),
            "environment": (*jobs.environment(self.task), "actor_rollout_ref.rollout.agent.kwargs.step_timeout_s=5"),
            "remote": self.server,
        }[name]
        return self.task.arguments(run, *job, *more, f"trainer.deadline_s.start={START_S}", deadline_s=DEADLINE_S)

    def undisturbed(self, name: str) -> dict[str, bytes]:
        """The weights of the job without a fault."""
        with self.turn:
            if name not in self.weights:
                folder = self.folder / f"undisturbed-{name}"
                job = jobs.start(self.arguments(name, folder / "run"), folder / "run", folder / "first.log")
                code = job.wait(RUN_S)
                job.end()
                if code != 0:
                    raise SystemExit(f"the {name} job without a fault ended with {code}:\n{job.output[-3000:]}")
                self.weights[name] = final_weights(job.folder)
        return self.weights[name]

    def run(self, case: Case, number: int) -> Outcome:
        """The job, its resume, and what they left."""
        with self.server_turn if case.job == "remote" else nullcontext():
            return self._run(case, number)

    def _run(self, case: Case, number: int) -> Outcome:
        outcome, folder = Outcome(case=case), self.folder / f"case-{number}"
        expected = self.undisturbed(case.job) if case.same else None
        arguments = self.arguments(case.job, folder / "run", *case.settings, case.rows)
        job = jobs.start(arguments, folder / "run", folder / "first.log")
        try:
            watch(job, outcome)
            if outcome.happened != WENT_ON and not outcome.problems:
                job = resume(job, arguments, outcome)
            if case.check is not None and not outcome.problems and (problem := case.check(job)):
                outcome.problems.append(problem)
        finally:
            job.end()
        if expected is not None and not outcome.problems and final_weights(folder / "run") != expected:
            outcome.problems.append("the final weights differ from those of the job without a fault")
        if outcome.problems:
            outcome.problems.append(f"logs in {folder}")
        else:
            shutil.rmtree(folder)
        return outcome


def watch(job: Job, outcome: Outcome) -> None:
    """Until the job has ended, and everything that it started."""
    code, ended = job.wait(RUN_S), time.time()
    struck = [json.loads(path.read_text())["time"] for path in sorted((job.folder / "logs").glob("fault-*.json"))]
    outcome.seconds = ended - max(struck, default=ended)
    outcome.happened = {None: "hung", 0: WENT_ON, -signal.SIGKILL: KILLED}.get(code, job.error or f"exit {code}")
    if len(struck) != len(outcome.case.faults):
        outcome.problems.append(f"{len(struck)} of {len(outcome.case.faults)} faults struck")
    if outcome.happened not in outcome.case.expected:
        expected = " or ".join(outcome.case.expected)
        outcome.problems.append(f"{outcome.happened}, expected {expected}: {job.output[-600:]!r}")
    if outcome.happened != WENT_ON and outcome.seconds > WITHIN_S:
        outcome.problems.append(f"only after {outcome.seconds:.0f} s")
    if left := job.ends_within(WITHIN_S):
        outcome.problems.append(f"{len(left)} processes outlived it: {'; '.join(left)}")


def resume(job: Job, arguments: Sequence[str], outcome: Outcome) -> Job:
    """The same command again: the fault has struck, so it comes to its end."""
    again = jobs.start(arguments, job.folder, job.log.with_name("again.log"))
    code = again.wait(RUN_S)
    outcome.resumed = "to its end" if code == 0 else f"ended with {code}"
    if code != 0:
        outcome.problems.append(f"started again it ended with {code}: {again.output[-600:]!r}")
    return again


@contextmanager
def rollout_server(task: Task) -> Iterator[tuple[str, ...]]:
    """A main_serve of the same model; the settings of a job that generates with it."""
    ready, key, admin = (task.folder / name for name in ("ready", "key", "admin-key"))
    command = [
        sys.executable,
        "-m",
        "rlhub.trainer.main_serve",
        f"model.path={task.folder / 'model'}",
        "server.port=0",
        "device=cpu",
    ]
    settings = [
        f"server.ready_file={ready}",
        f"server.api_key_file={key}",
        f"server.admin_key_file={admin}",
        "rollout.name=hf",
        "rollout.max_model_len=64",
    ]
    with (task.folder / "server.log").open("w") as log:
        process = subprocess.Popen([*command, *settings], stdout=log, stderr=log, env=jobs.environment_variables())
    try:
        deadline = time.monotonic() + RUN_S
        while not ready.is_file():
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the rollout server did not start:\n{(task.folder / 'server.log').read_text()[-3000:]}")
            time.sleep(0.1)
        remote = "actor_rollout_ref.rollout.remote"
        yield (
            "actor_rollout_ref.rollout.name=remote",
            f"{remote}.urls=[{ready.read_text()}]",
            f"{remote}.api_key_file={key}",
            f"{remote}.admin_key_file={admin}",
            f"{remote}.weights_folder={task.folder / 'published'}",
        )
    finally:
        process.terminate()
        process.wait(WITHIN_S)


def show(outcomes: Sequence[Outcome]) -> int:
    table = Table("group", "fault", "job", "happened", "s", "started again", "problems")
    for outcome in outcomes:
        case = outcome.case
        row = (case.group, case.name, case.job, outcome.happened, f"{outcome.seconds:.1f}", outcome.resumed)
        table.add_row(*row, "; ".join(outcome.problems))
    console.print(table)
    wrong = [outcome for outcome in outcomes if outcome.problems]
    console.print(f"{len(outcomes) - len(wrong)} of {len(outcomes)} as expected" + (": FAILED" if wrong else ""))
    return int(bool(wrong))


def main() -> int:
    groups = list(dict.fromkeys(case.group for case in CASES))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(groups), help="groups of faults (default: %(default)s)")
    parser.add_argument("--match", default="", help="of these, the cases with this in their name")
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the jobs write; those with problems stay there")
    given = parser.parse_args()
    chosen = [case for case in CASES if case.group in given.only.split(",") and given.match in case.name]
    if unknown := [name for name in given.only.split(",") if name not in groups]:
        parser.error(f"no group {', '.join(unknown)}; known: {', '.join(groups)}")
    folder = given.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    task = Task(folder=folder / "task", seconds=0.01).write()
    outcomes = []
    with ExitStack() as stack:
        remote = any(case.job == "remote" for case in chosen)
        runner = Runner(task=task, folder=folder, server=stack.enter_context(rollout_server(task)) if remote else ())
        pool = stack.enter_context(ThreadPoolExecutor(given.jobs))
        for number, outcome in enumerate(pool.map(runner.run, chosen, range(len(chosen))), 1):
            said = "; ".join(outcome.problems) or "as expected"
            console.print(f"[{number}/{len(chosen)}] {outcome.case.name}: {outcome.happened}, {outcome.seconds:.1f} s: {said}")
            outcomes.append(outcome)
    return show(outcomes)


if __name__ == "__main__":
    sys.exit(main())
